"""SGLang's own loaders fill every parameter from what gguf2st writes.

There is no build of SGLang's kernels for CPUs, so these checkpoints aren't run. But a mistake in a
name, a shape or the quantization config shows before that: SGLang reads the config, builds the model
as for an H100 and loads the weights, and nothing of the model may be left as it was.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import gguf2st
from gguf2st.engines.sglang import SgLang
from tests.engines.exchange import REPOSITORY, Job, Result, ask

FIXTURES = REPOSITORY / "fixtures"
TIMEOUT = 900.0  # seconds for all checkpoints: a minute or two on two idle cores

# Name -> format, its options, and the class of SGLang that has to read the quantization_config.
FORMATS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bf16": ("bf16", {}, "NoneType"),
    "awq": ("awq", {}, "AWQMarlinConfig"),
    "awq-symmetric": ("awq", {"symmetric": True}, "AWQMarlinConfig"),
    "ct4": ("ct", {}, "CompressedTensorsConfig"),
    "ct4-asymmetric": ("ct", {"symmetric": False}, "CompressedTensorsConfig"),
    "ct8": ("ct", {"bits": 8, "group_size": 32}, "CompressedTensorsConfig"),
    "ct8-channel": ("ct", {"bits": 8, "group_size": 0}, "CompressedTensorsConfig"),
    "gptq4": ("gptq", {}, "GPTQMarlinConfig"),
    "gptq4-g64": ("gptq", {"group_size": 64}, "GPTQMarlinConfig"),
    "gptq8": ("gptq", {"bits": 8}, "GPTQMarlinConfig"),
    "fp8": ("fp8", {}, "CompressedTensorsConfig"),
    "fp8-block": ("fp8", {"variant": "block"}, "Fp8Config"),
    "w8a8": ("w8a8", {}, "CompressedTensorsConfig"),
    "nvfp4": ("nvfp4", {}, "CompressedTensorsConfig"),
    "w4afp8": ("w4afp8", {}, "W4AFp8Config"),
    "mxfp4": ("mxfp4", {}, ""),
    "quality-2": ("ct", {}, "CompressedTensorsConfig"),
    "quality-3": ("ct", {}, "CompressedTensorsConfig"),
    "9-bits": ("ct", {}, "CompressedTensorsConfig"),
}
# Mixes of int4 and int8.
CHOICES: dict[str, dict[str, Any]] = {
    "quality-2": {"quality": 2},
    "quality-3": {"quality": 3},
    "9-bits": {"bits_per_weight": 9.0},
}
NOT_FOR_LLAMA = ("gptq4-g64", "fp8-block", "w4afp8", "mxfp4", "quality-2")
DENSE = [name for name in FORMATS if name not in NOT_FOR_LLAMA]
OTHERS = ("qwen2", "qwen3", "qwen2moe", "mixtral", "gemma2")
EXPERTS = ["bf16", "awq", "ct4", "ct8", "gptq4", "gptq8", "fp8", "fp8-block", "nvfp4", "w4afp8"]
EXPERTS.append("quality-2")


@dataclass(frozen=True)
class Case:
    """A fixture with a format, loaded on so many tensor-parallel ranks.

    `drafter` is the class that SGLang drafts with the MTP block in, instead of the model's own.
    """

    fixture: str
    format: str
    drafter: str = ""
    ranks: int = 1

    def __str__(self) -> str:
        return self.checkpoint + ("-drafter" if self.drafter else "")

    @property
    def checkpoint(self) -> str:
        """The directory's name."""
        return f"{self.fixture}-{self.format}" + (f"-tp{self.ranks}" if self.ranks > 1 else "")

    def convert(self, directory: Path) -> gguf2st.ConversionReport:
        """Convert into a directory below this one."""
        folder = FIXTURES / self.fixture
        *_, model = sorted(folder.glob(f"{self.fixture}-*.gguf"))
        to, options, _ = FORMATS[self.format]
        return gguf2st.convert(
            model,
            directory / self.checkpoint,
            mmproj=min(folder.glob("mmproj-*.gguf"), default=None),
            to=to,
            target=gguf2st.TargetOptions(**options),
            engines=("sglang",),
            tensor_parallel=(1, self.ranks),
            fit="rtn",  # quicker, and as good as any for names and shapes
            **CHOICES.get(self.format, {}),
        )

    def job(self, directory: Path) -> Job:
        """What to ask SGLang for."""
        options = {"ranks": self.ranks, "drafter": bool(self.drafter)}
        return Job(str(self), str(directory / self.checkpoint), "auto", options=options)


CASES = [
    *(Case("llama", name) for name in DENSE),
    *(Case("qwen3moe", name) for name in EXPERTS),
    # With a vision tower, and an MTP block that the model itself has to pass over.
    *(
        Case("qwen35", n)
        for n in ("bf16", "awq", "ct4", "ct4-asymmetric", "fp8-block", "quality-2")
    ),
    *(Case("gemma3-vision", name) for name in ("bf16", "awq", "ct4", "fp8-block")),
    *(Case("gemma3-small", name) for name in ("bf16", "awq")),
    # Each class has a loader of its own.
    *(Case(fixture, name) for fixture in OTHERS for name in ("awq", "ct4", "fp8-block")),
    # Their experts are too narrow for groups of 128: "ct4" mixes groups of 64 and 128.
    *(Case("qwen35moe", name) for name in ("bf16", "awq", "ct4", "gptq4-g64")),
    *(Case("qwen3next", name) for name in ("bf16", "awq", "ct4", "fp8")),
    *(Case("qwen35", n, drafter="Qwen3_5ForCausalLMMTP") for n in ("bf16", "awq", "ct4")),
    *(Case("qwen35moe", n, drafter="Qwen3_5ForCausalLMMTP") for n in ("bf16", "ct4")),
    Case("llama", "ct4", ranks=2),
    Case("qwen35", "awq", ranks=2),
    Case("qwen3moe", "ct4", ranks=2),
]
# What the rules refuse for SGLang, and how SGLang fails with it where they are left aside: by an
# exception with these words, or by leaving such parameters unfilled.
REFUSED = {
    Case("llama", "mxfp4"): "No compressed-tensors compatible scheme was found",
    Case("qwen3moe", "ct4-asymmetric"): "must match the size of tensor",
    Case("qwen3moe", "w8a8"): "implemented only for NPU",
    Case("llama", "fp8-block"): ".weight_scale_inv",
    Case("mixtral", "w4afp8"): "loaded_weight.dtype=torch.int8",
}
# What the kernels do without.
OPTIONAL = (
    ".attn.k_scale",  # of an FP8 KV cache: 1 unless loaded
    ".attn.v_scale",
    ".experts.w13_weight_g_idx",  # emptied after loading unless the columns are reordered
    ".experts.w2_weight_g_idx",
    ".experts.w13_g_idx_sort_indices",
    ".experts.w2_g_idx_sort_indices",
)
# SGLang gives the model's own head to the drafter.
OPTIONAL_IN_DRAFTER = (*OPTIONAL, "lm_head.weight")
SPOILT = Case("llama", "bf16")
LOST = "model.layers.1.mlp.up_proj.weight"
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@dataclass(frozen=True)
class Run:
    """What was converted, and what SGLang said."""

    reports: dict[str, gguf2st.ConversionReport] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Convert everything once and give all of it to one process of SGLang."""
    directory = tmp_path_factory.mktemp("sglang")
    reports: dict[str, gguf2st.ConversionReport] = {}
    for case in CASES:
        if case.checkpoint not in reports:
            reports[case.checkpoint] = case.convert(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SgLang, "target_refusal", lambda *_, **__: "")
        patch.setattr("gguf2st.conversion.check_loading", lambda *_: None)
        for case in REFUSED:
            case.convert(directory)
    spoilt = directory / "spoilt"
    lose_tensor(directory / SPOILT.checkpoint, spoilt)
    jobs = [case.job(directory) for case in (*CASES, *REFUSED)]
    jobs.append(Job("spoilt", str(spoilt), "auto"))
    results = ask("tests.engines.run_sglang", jobs, directory / "sglang.log", TIMEOUT)
    return Run(reports, results)


def lose_tensor(source: Path, copy: Path) -> None:
    """Copy a checkpoint of one file without the tensor LOST."""
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    del tensors[LOST]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})


@each_case
def test_sglang_fills_every_parameter(case: Case, run: Run) -> None:
    result = run.results[str(case)]
    if result.error:
        pytest.fail(result.error, pytrace=False)
    report = run.reports[case.checkpoint]
    assert result.classes == {
        "model": case.drafter or report.model_class,
        "quantization": FORMATS[case.format][2],
    }
    assert bool(report.modules) is (case.format != "bf16")
    optional = OPTIONAL_IN_DRAFTER if case.drafter else OPTIONAL
    unfilled = result.loading["unfilled"]
    assert not [text for text in unfilled if not text.split()[0].endswith(optional)]


@pytest.mark.parametrize(
    "case", [Case("qwen35moe", "ct4"), *(c for c in CASES if c.format in CHOICES)], ids=str
)
def test_one_format_mixes_schemes(case: Case, run: Run) -> None:
    """So that several groups of one config are among what was loaded."""
    modules = run.reports[str(case)].modules
    assert len({str(module.scheme) for module in modules}) > 1


def test_a_lost_tensor_is_noticed(run: Run) -> None:
    """Half of the matrix that SGLang makes of gate_proj and up_proj stays unfilled."""
    config = json.loads((FIXTURES / SPOILT.fixture / "config.json").read_text())
    half = config["intermediate_size"] * config["hidden_size"]
    assert run.results["spoilt"].loading["unfilled"] == [
        f"model.layers.1.mlp.gate_up_proj.weight {half} of {2 * half} values"
    ]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_the_rules_refuse_fails_in_sglang(case: Case, run: Run, tmp_path: Path) -> None:
    with pytest.raises(gguf2st.UnsupportedError, match="SGLang"):
        case.convert(tmp_path)
    result = run.results[str(case)]
    assert REFUSED[case] in (result.error or " ".join(result.loading["unfilled"]))
