"""vLLM and transformers load what gguf2st quantizes, and compute what the weights stand for.

Every quantized checkpoint is decoded, by code that isn't ours, to a dense one, which transformers
runs in float32: that is the reference. vLLM runs the quantized checkpoint on the CPU; where it has
no kernel there, or one for AMX only, `reference_kernels` take its place, and everything up to the
product with the weights remains vLLM's. transformers runs all but AWQ and GPTQ, for which it needs
gptqmodel, and int8 experts, which it can't merge; of NVFP4 neither can do anything on a CPU.

Models as their makers published them are continued with a sentence's obvious end.
"""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import gguf2st
from tests.conversions import importance
from tests.engines.agreement import (
    DRAFTING,
    FIXTURES,
    IDS,
    IMAGES_ONLY,
    NEW_TOKENS,
    QUESTION,
    ask_both,
    chat,
    check_greedy,
    draw_image,
    loaded,
)
from tests.engines.dequantized import dequantize
from tests.engines.exchange import Answer, Job, Prompt, Result
from tests.oracles import real_models

# Largest difference of the log-probability of any of a prompt's tokens from the reference. Where
# activations aren't quantized, it comes from their rounding alone: none in float32 (measured:
# 0.00001), 11 bits in float16 (0.008), 8 in bfloat16 (0.1). A permuted head, a shifted zero
# point or a wrong nibble order moves it by several units.
TOLERANCE = {"float32": 0.001, "float16": 0.02, "bfloat16": 0.15}
# Gated delta nets, whose kernels on a CPU take bfloat16 only, carry roundings on from token to
# token: measured up to 0.1 here, and 0.27 on models of this size and randomness.
DELTA_NET_TOLERANCE = 0.3
DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
# Both engines quantize activations to one of 256 integers of a token's range, or to 3 bits of
# mantissa, before each product with weights of these formats; the reference doesn't.
# Measured: 0.11 and 0.41.
ACTIVATIONS_TOLERANCE = {"w8a8": 0.25, "fp8": 0.8}
# transformers merges decompressed experts in the scales' dtype, bfloat16 (measured: 0.007 at the
# median position).
MERGED_EXPERTS_TOLERANCE = 0.03
# Candidates so nearly equal may change places.
NEAR_TIE = TOLERANCE


@dataclass(frozen=True)
class Format:
    """A target with its options, and other choices of a conversion."""

    to: str
    options: dict[str, Any] = field(default_factory=dict)
    importance: bool = False
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def in_transformers(self) -> bool:
        return self.to not in ("awq", "gptq")


FORMATS = {
    "int4": Format("ct"),  # groups of 128 where they fit, and smaller ones where they don't
    "int4-asymmetric-g32": Format("ct", {"symmetric": False, "group_size": 32}),
    "int8": Format("ct", {"bits": 8}),
    "int8-g32": Format("ct", {"bits": 8, "group_size": 32}),
    "mixed": Format("ct", {"group_size": 32, "mixed": (("attn", "int8"),)}),  # the rest is int4
    "w8a8": Format("w8a8"),
    "fp8": Format("fp8"),
    "fp8-block": Format("fp8", {"variant": "block"}),
    "awq": Format("awq"),
    "awq-g32": Format("awq", {"group_size": 32}),
    "gptq": Format("gptq"),
    # Mixes of int4 and int8, which the configuration tells apart by names.
    "quality-2": Format("ct", choices={"quality": 2}),
    "quality-3": Format("ct", choices={"quality": 3}),
    "9-bits": Format("ct", choices={"bits_per_weight": 9.0}),
    "awq-importance": Format("awq", importance=True),
    "lossless": Format("lossless"),
    "mxfp4": Format("mxfp4"),
}


@dataclass(frozen=True)
class Case:
    """A fixture in a format; `dtype` is what vLLM computes in."""

    fixture: str
    format: str
    dtype: str
    mmproj: bool = False
    mtp: bool = False
    image: bool = False  # among the prompts
    loads_only: bool = False

    def __str__(self) -> str:
        return f"{self.fixture}-{self.format}"

    @property
    def experts(self) -> bool:
        return "moe" in self.fixture or "next" in self.fixture

    @property
    def in_transformers(self) -> bool:
        return FORMATS[self.format].in_transformers and not (self.experts and self.format == "w8a8")

    @property
    def transformers_dtype(self) -> str:
        """MXFP4 is decompressed to bfloat16 whatever the model computes in."""
        return "bfloat16" if self.format == "mxfp4" else "float32"

    def convert(self, directory: Path) -> str:
        """Convert into a directory below this one, dequantize it; return the model class."""
        folder, chosen = FIXTURES / self.fixture, FORMATS[self.format]
        *_, model = sorted(folder.glob(f"{self.fixture}-*.gguf"))
        report = gguf2st.convert(
            model,
            directory / str(self),
            mmproj=min(folder.glob("mmproj-*.gguf")) if self.mmproj else None,
            to=chosen.to,
            target=gguf2st.TargetOptions(**chosen.options),
            importance=importance(gguf2st.open_model(model), 1.0) if chosen.importance else None,
            **chosen.choices,
        )
        assert not chosen.choices or len(report.schemes) > 1
        dequantize(directory / str(self), directory / f"{self}-dense")
        return report.model_class


CASES = (
    Case("llama", "int4", "float16"),
    Case("llama", "int4-asymmetric-g32", "float16"),
    Case("llama", "mixed", "float16"),
    Case("llama", "quality-3", "float16"),
    Case("llama", "9-bits", "float16"),
    Case("llama", "int8", "float32"),
    Case("llama", "int8-g32", "float32"),
    Case("llama", "w8a8", "float32"),
    Case("llama", "fp8", "float32"),
    Case("llama", "fp8-block", "float16"),
    Case("llama", "awq", "float16"),
    Case("llama", "awq-g32", "float16"),
    Case("llama", "gptq", "float16"),
    Case("llama", "mxfp4", "float32"),
    Case("blocks", "lossless", "float16"),
    Case("qwen35", "int4", "bfloat16", mmproj=True, mtp=True, image=True),
    Case("qwen35", "awq", "bfloat16", mmproj=True, mtp=True, image=True),
    Case("qwen35", "awq-importance", "bfloat16", mmproj=True),
    Case("qwen35", "mixed", "bfloat16", mmproj=True),
    Case("qwen35", "quality-2", "bfloat16", mmproj=True),
    Case("qwen35", "fp8-block", "bfloat16", mmproj=True),
    # vLLM's gated delta nets on a CPU need heads of 64 or 128, and those here have 32.
    Case("qwen35moe", "int4", "bfloat16", mtp=True, loads_only=True),
    Case("qwen35moe", "awq", "bfloat16", loads_only=True),
    Case("qwen35moe", "w8a8", "bfloat16", loads_only=True),
    Case("qwen35moe", "fp8-block", "bfloat16", loads_only=True),
    Case("qwen3next", "int4", "bfloat16", loads_only=True),
    Case("qwen3next", "awq", "bfloat16", loads_only=True),
    # vLLM refuses float16 for Gemma 3.
    Case("gemma3-vision", "int4", "bfloat16"),
    Case("gemma3-vision", "awq", "bfloat16"),
    Case("qwen3moe", "int4", "float16"),
    Case("qwen3moe", "awq", "float16"),
    Case("qwen3moe", "gptq", "float16"),
    Case("qwen3moe", "w8a8", "float32"),
    Case("qwen3moe", "fp8-block", "float16"),
)
RUNNING = [case for case in CASES if not case.loads_only]
IN_TRANSFORMERS = [case for case in CASES if case.in_transformers]
WITH_MTP = [case for case in CASES if case.mtp]
# SmolLM2 has 576 columns, which 128 doesn't divide: compressed-tensors takes smaller groups by
# itself, AWQ has one size for the whole checkpoint.
REAL_FORMATS = {"int4": Format("ct"), "awq-g64": Format("awq", {"group_size": 64})}
# vLLM tries the most tokens that it may be given at once before it serves, which takes a while
# with real models and with experts one by one.
FEW_TOKENS = {"max_num_batched_tokens": 64}
# A sentence for each, and what the unquantized model continues it with. Gemma 3 270M isn't trained
# to answer and has to see the pattern.
SENTENCES = {
    "smollm2": ("The capital of France is", "Paris"),
    "gemma3_270m": ("The capital of France is Paris, and the capital of Germany is", "Berlin"),
}
# Each format of Gemma is loaded with the same quarter of a million tokens, which takes vLLM half a
# minute; its own int4 is that of the small Gemma above.
REAL = (("smollm2", "int4"), ("smollm2", "awq-g64"), ("gemma3_270m", "awq-g64"))


@dataclass(frozen=True)
class Run:
    """All that the engines said."""

    classes: dict[str, str]  # that were meant to be converted to
    vllm: dict[str, Result]
    transformers: dict[str, Result]

    def reference(self, case: Case) -> list[Answer]:
        """What transformers makes of the dense checkpoint."""
        return loaded(self.transformers[f"{case}-dense"]).answers


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Convert every case and give all of them to one process of each engine."""
    directory = tmp_path_factory.mktemp("quantized")
    image = draw_image(directory / "image.png")
    classes, vllm, transformers = {}, [], []
    for case in CASES:
        classes[str(case)] = case.convert(directory)
        prompts = [Prompt(IDS)] + ([chat(QUESTION, image)] if case.image else [])
        options = IMAGES_ONLY if case.mmproj else FEW_TOKENS
        checkpoint, dense = str(directory / str(case)), str(directory / f"{case}-dense")
        vllm.append(
            Job(
                str(case),
                checkpoint,
                case.dtype,
                [] if case.loads_only else prompts,
                NEW_TOKENS,
                options,
            )
        )
        if case.mtp:
            vllm.append(Job(f"{case}-mtp", checkpoint, case.dtype, options=options | DRAFTING))
        transformers.append(Job(f"{case}-dense", dense, "float32", prompts, NEW_TOKENS))
        if case.in_transformers:
            dtype = case.transformers_dtype
            transformers.append(Job(str(case), checkpoint, dtype, [Prompt(IDS)], NEW_TOKENS))
    for model, name in REAL:
        chosen, checkpoint = REAL_FORMATS[name], str(directory / f"{model}-{name}")
        gguf2st.convert(
            getattr(real_models, model)(),
            checkpoint,
            to=chosen.to,
            target=gguf2st.TargetOptions(**chosen.options),
        )
        prompts = [Prompt(text=SENTENCES[model][0])]
        vllm.append(Job(f"{model}-{name}", checkpoint, "auto", prompts, 4, FEW_TOKENS))
    return Run(classes, *ask_both(vllm, transformers, directory))


def difference(case: Case, answer: Answer, reference: Answer) -> float:
    """Of the log-probabilities of a prompt's tokens: the largest.

    With experts the median: where two are nearly even, a rounding error decides which is used.
    """
    pairs = zip(answer.prompt_log_probs, reference.prompt_log_probs, strict=True)
    differences = [abs(a - b) for a, b in pairs]
    return median(differences) if case.experts else max(differences)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_loads_the_class(case: Case, run: Run) -> None:
    assert loaded(run.vllm[str(case)]).classes["model"] == run.classes[str(case)]


@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_vllm_computes_what_the_weights_stand_for(case: Case, run: Run) -> None:
    tolerance = DELTA_NET_TOLERANCE if case.fixture in DELTA_NETS else TOLERANCE[case.dtype]
    tolerance = max(tolerance, ACTIVATIONS_TOLERANCE.get(case.format, 0))
    for vllm, reference in zip(
        loaded(run.vllm[str(case)]).answers, run.reference(case), strict=True
    ):
        assert vllm.ids == reference.ids
        assert difference(case, vllm, reference) <= tolerance
        if case.format not in ACTIVATIONS_TOLERANCE:
            check_greedy(vllm, reference, NEAR_TIE[case.dtype])


@pytest.mark.parametrize("case", WITH_MTP, ids=str)
def test_vllm_loads_the_mtp_head(case: Case, run: Run) -> None:
    """Names and shapes suit; drafting itself damages memory in vLLM 0.32.0's CPU build."""
    loaded(run.vllm[f"{case}-mtp"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_dense_checkpoint_is_complete(case: Case, run: Run) -> None:
    """Every quantized module was found and decoded, so the reference is what it should be."""
    check_keys(loaded(run.transformers[f"{case}-dense"]))


@pytest.mark.parametrize("case", IN_TRANSFORMERS, ids=str)
def test_transformers_loads_every_tensor(case: Case, run: Run) -> None:
    result = loaded(run.transformers[str(case)])
    assert result.classes["model"] == run.classes[str(case)]
    check_keys(result)


@pytest.mark.parametrize("case", IN_TRANSFORMERS, ids=str)
def test_transformers_computes_what_the_weights_stand_for(case: Case, run: Run) -> None:
    tolerance = ACTIVATIONS_TOLERANCE.get(case.format, TOLERANCE[case.transformers_dtype])
    if case.experts:
        tolerance = max(tolerance, MERGED_EXPERTS_TOLERANCE)
    [answer] = loaded(run.transformers[str(case)]).answers
    assert difference(case, answer, run.reference(case)[0]) <= tolerance


def check_keys(result: Result) -> None:
    wrong = {
        kind: [key for key in keys if not key.startswith("mtp.")]  # transformers has no MTP
        for kind, keys in result.loading.items()
    }
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize(("model", "name"), REAL)
def test_vllm_completes_a_sentence_with_a_real_model(model: str, name: str, run: Run) -> None:
    [answer] = loaded(run.vllm[f"{model}-{name}"]).answers
    assert SENTENCES[model][1] in answer.text
