"""vLLM and transformers load what gguf2st writes, and compute the same from it.

Both engines have their own model classes, weight loaders, tokenizer and processor code paths. Each
loads every converted checkpoint with no more than its directory and continues the same prompts
greedily: token ids, a chat through the checkpoint's template and, where there is a vision tower, a
chat with an image through its processor.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

import gguf2st
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
from tests.engines.exchange import Answer, Job, Prompt, Result

# transformers computes in float32, and so does vLLM where it can. Then they differ by the order of
# sums: by 0.00001 at most in any log-probability of these models.
#
# vLLM's kernels for gated delta nets (Qwen3.5) take bfloat16 only on a CPU, so every activation
# between two operations is rounded to 8 bits. Measured on models of this size and randomness, with
# the very weights of the original, that moves the log-probability of a prompt's token by 0.04 ...
# 0.27, and of a likely token by 0.08. A permuted head or a norm without its 1 moves them by
# several units.
LOG_PROB_TOLERANCE = {"float32": 0.001, "bfloat16": 0.3}
# Two candidates that transformers holds for so nearly equal may change places: each of them moves
# by up to 0.08 when activations are rounded to bfloat16.
NEAR_TIE = {"float32": 0.001, "bfloat16": 0.15}


@dataclass(frozen=True)
class Case:
    """A quantized GGUF of a fixture, and what vLLM runs it with.

    `outliers` is for mixtures of experts: where two experts are nearly even, a rounding error
    decides which is used, so the median position has to agree instead of every one.
    """

    fixture: str
    mmproj: bool = False
    dtype: str = "float32"
    outliers: bool = False
    mtp: bool = False
    loads_only: bool = False  # vLLM's kernels for the CPU don't take its shapes

    @property
    def name(self) -> str:
        """A name for tests and directories."""
        return self.fixture + ("-mmproj" if self.mmproj else "")

    def __str__(self) -> str:
        return self.name

    def convert(self, directory: Path) -> str:
        """Convert into a directory below this one; return the model class."""
        folder = FIXTURES / self.fixture
        *_, model = sorted(folder.glob(f"{self.fixture}-*.gguf"))
        mmproj = min(folder.glob("mmproj-*.gguf")) if self.mmproj else None
        return gguf2st.convert(model, directory / self.name, mmproj=mmproj).model_class


CASES = (
    Case("qwen35", mmproj=True, dtype="bfloat16", mtp=True),
    Case("qwen35", dtype="bfloat16", mtp=True),
    # "Unexpected head dim size, 32": vLLM's gated delta nets on a CPU need heads of 64 or 128.
    Case("qwen35moe", dtype="bfloat16", outliers=True, mtp=True, loads_only=True),
    Case("llama"),
    Case("qwen3"),
    Case("qwen3moe", outliers=True),
    Case("qwen3vl"),  # its text alone: the class of Qwen3
    Case("gemma3-vision"),  # its text alone
)
WITH_MTP = [case for case in CASES if case.mtp]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_running_case = pytest.mark.parametrize(
    "case", [case for case in CASES if not case.loads_only], ids=str
)


@dataclass(frozen=True)
class Run:
    """All that the engines said."""

    classes: dict[str, str]  # that were meant to be converted to
    vllm: dict[str, Result]
    transformers: dict[str, Result]

    def answers(self, case: Case) -> list[tuple[Answer, Answer]]:
        """Both engines' answers to each prompt: vLLM's and transformers'."""
        both = loaded(self.vllm[case.name]), loaded(self.transformers[case.name])
        return list(zip(*(result.answers for result in both), strict=True))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Convert every case and give all of them to one process of each engine."""
    directory = tmp_path_factory.mktemp("engines")
    classes = {case.name: case.convert(directory) for case in CASES}
    image = draw_image(directory / "image.png")
    vllm_jobs, transformers_jobs = [], []
    for case in CASES:
        checkpoint = str(directory / case.name)
        prompts = [Prompt(IDS), chat(QUESTION)] + ([chat(QUESTION, image)] if case.mmproj else [])
        vllm_jobs.append(
            Job(
                case.name,
                checkpoint,
                case.dtype,
                [] if case.loads_only else prompts,
                NEW_TOKENS,
                options=IMAGES_ONLY if case.mmproj else {},
            )
        )
        transformers_jobs.append(Job(case.name, checkpoint, "float32", prompts, NEW_TOKENS))
    for case in WITH_MTP:
        options = DRAFTING | (IMAGES_ONLY if case.mmproj else {})
        vllm_jobs.append(
            Job(f"{case.name}-mtp", str(directory / case.name), case.dtype, options=options)
        )
    return Run(classes, *ask_both(vllm_jobs, transformers_jobs, directory))


@each_case
def test_vllm_loads_the_class(case: Case, run: Run) -> None:
    assert loaded(run.vllm[case.name]).classes["model"] == run.classes[case.name]


@each_case
def test_transformers_loads_every_tensor_of_the_class(case: Case, run: Run) -> None:
    result = loaded(run.transformers[case.name])
    assert result.classes["model"] == run.classes[case.name]
    wrong = {
        kind: [key for key in keys if not key.startswith("mtp.")]  # transformers has no MTP
        for kind, keys in result.loading.items()
    }
    assert not any(wrong.values()), wrong


@each_running_case
def test_both_make_the_same_tokens_of_a_chat(case: Case, run: Run) -> None:
    answers = run.answers(case)
    assert len(answers) == (3 if case.mmproj else 2)
    for vllm, transformers in answers:
        assert vllm.ids == transformers.ids


@each_running_case
def test_prompt_log_probs_agree(case: Case, run: Run) -> None:
    for vllm, transformers in run.answers(case):
        pairs = zip(vllm.prompt_log_probs, transformers.prompt_log_probs, strict=True)
        differences = [abs(a - b) for a, b in pairs]
        difference = median(differences) if case.outliers else max(differences)
        assert difference <= LOG_PROB_TOLERANCE[case.dtype]


@each_running_case
def test_greedy_tokens_are_equal(case: Case, run: Run) -> None:
    for vllm, transformers in run.answers(case):
        check_greedy(vllm, transformers, NEAR_TIE[case.dtype])


@pytest.mark.parametrize("case", WITH_MTP, ids=str)
def test_vllm_loads_the_mtp_head(case: Case, run: Run) -> None:
    """Names and shapes suit; drafting itself damages memory in vLLM 0.32.0's CPU build."""
    loaded(run.vllm[f"{case.name}-mtp"])
