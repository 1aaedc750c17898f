"""vLLM and transformers load what gguf2st writes, and compute the same from it.

Both engines have their own model classes, weight loaders, tokenizer and processor code paths. Each
loads every converted checkpoint with no more than its directory and continues the same prompts
greedily: token ids, a chat through the checkpoint's template and, where there is a vision tower, a
chat with an image through its processor.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

import gguf2st
from tests.engines.exchange import REPOSITORY, Answer, Job, Prompt, Result, ask

FIXTURES = REPOSITORY / "fixtures"
NEW_TOKENS = 12
TIMEOUT = 900.0  # seconds for an engine to do all jobs; usual are 60 on two idle cores

# transformers computes in float32, and so does vLLM where it can. Then they differ by the order of
# sums: by 0.00001 at most in any log-probability of these models.
#
# vLLM's kernels for gated delta nets (Qwen3.5) take bfloat16 only on a CPU, so every activation
# between two operations is rounded to 8 bits. Measured on models of this size and randomness, with
# the very weights of the original, that moves the log-probability of a prompt's token by 0.04 ...
# 0.27, and of a likely token by 0.07. A permuted head or a norm without its 1 moves them by
# several units.
LOG_PROB_TOLERANCE = {"float32": 0.001, "bfloat16": 0.3}
# Two candidates that transformers holds for so nearly equal may change places: each of them moves
# by up to 0.07 when activations are rounded to bfloat16.
NEAR_TIE = {"float32": 0.001, "bfloat16": 0.15}

IDS = [39, 68, 75, 290, 296, 268, 309, 111, 275, 310, 105, 297, 220, 46, 47, 48]
QUESTION = "What's in 3 pictures?"
IMAGES_ONLY = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_mm_profiling": True}
DRAFTING = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


@dataclass(frozen=True)
class Case:
    """A GGUF of the fixtures, and what vLLM runs it with."""

    model: str
    mmproj: str | None = None
    dtype: str = "float32"
    experts: bool = False
    mtp: bool = False

    @property
    def name(self) -> str:
        """A name for tests and directories."""
        return Path(self.model).stem + ("-mmproj" if self.mmproj else "")

    __str__ = name.fget

    def convert(self, directory: Path) -> str:
        """Convert into a directory below this one; return the model class."""
        mmproj = FIXTURES / self.mmproj if self.mmproj else None
        report = gguf2st.convert(FIXTURES / self.model, directory / self.name, mmproj=mmproj)
        return report.model_class


CASES = (
    Case("qwen35/qwen35-Q4_K_M.gguf", "qwen35/mmproj-qwen35-f16.gguf", dtype="bfloat16", mtp=True),
    Case("qwen35/qwen35-Q4_K_M.gguf", dtype="bfloat16", mtp=True),
    Case(
        "qwen35moe/qwen35moe-Q4_K_M.gguf",
        "qwen35moe/mmproj-qwen35moe-f16.gguf",
        dtype="bfloat16",
        experts=True,
        mtp=True,
    ),
    Case("llama/llama-Q4_K_M.gguf"),
    Case("qwen3/qwen3-Q4_K_M.gguf"),
    Case("qwen3moe/qwen3moe-Q4_K_M.gguf", experts=True),
    Case("qwen3vl/qwen3vl-Q4_K_M.gguf", "qwen3vl/mmproj-qwen3vl-q8_0.gguf"),
    Case("gemma3/gemma3-Q4_K_M.gguf"),
    Case(
        "gemma3-vision/gemma3-vision-Q4_K_M.gguf",
        "gemma3-vision/mmproj-gemma3-vision-f16.gguf",
    ),
)
WITH_MTP = [case for case in CASES if case.mtp]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


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


def loaded(result: Result) -> Result:
    """Pass a result that isn't an error."""
    if result.error:
        pytest.fail(result.error, pytrace=False)
    return result


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
        options = IMAGES_ONLY if case.mmproj else {}
        vllm_jobs.append(
            Job(case.name, checkpoint, case.dtype, prompts, NEW_TOKENS, options=options)
        )
        transformers_jobs.append(Job(case.name, checkpoint, "float32", prompts, NEW_TOKENS))
    for case in WITH_MTP:
        options = DRAFTING | (IMAGES_ONLY if case.mmproj else {})
        vllm_jobs.append(
            Job(f"{case.name}-mtp", str(directory / case.name), case.dtype, options=options)
        )
    with ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(
                ask, f"tests.engines.run_{engine}", jobs, directory / f"{engine}.log", TIMEOUT
            )
            for engine, jobs in (("vllm", vllm_jobs), ("transformers", transformers_jobs))
        ]
        return Run(classes, *(future.result() for future in futures))


def chat(text: str, image: Path | None = None) -> Prompt:
    """A question, about an image if there is one."""
    if image is None:
        return Prompt(messages=[{"role": "user", "content": text}])
    parts = [{"type": "image", "path": str(image)}, {"type": "text", "text": text}]
    return Prompt(messages=[{"role": "user", "content": parts}])


def draw_image(path: Path) -> Path:
    """Draw colour gradients with stripes."""
    import numpy as np
    from PIL import Image

    rows, columns = np.indices((96, 128))
    stripes = (rows + columns) // 16 % 2 * 255
    Image.fromarray(np.stack([rows * 2, columns * 2, stripes], -1).astype(np.uint8)).save(path)
    return path


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


@each_case
def test_both_make_the_same_tokens_of_a_chat(case: Case, run: Run) -> None:
    answers = run.answers(case)
    assert len(answers) == (3 if case.mmproj else 2)
    for vllm, transformers in answers:
        assert vllm.ids == transformers.ids


@each_case
def test_prompt_log_probs_agree(case: Case, run: Run) -> None:
    for vllm, transformers in run.answers(case):
        pairs = zip(vllm.prompt_log_probs, transformers.prompt_log_probs, strict=True)
        differences = [abs(a - b) for a, b in pairs]
        # Where two experts are nearly even, a rounding error decides which is used, and that
        # position differs wholly: with experts, the median position has to agree.
        difference = median(differences) if case.experts else max(differences)
        assert difference <= LOG_PROB_TOLERANCE[case.dtype]


@each_case
def test_greedy_tokens_are_equal(case: Case, run: Run) -> None:
    for vllm, transformers in run.answers(case):
        check_greedy(vllm, transformers, NEAR_TIE[case.dtype])


def check_greedy(vllm: Answer, transformers: Answer, near_tie: float) -> None:
    """Compare up to the first difference, which has to be a near-tie; the rest has other prefixes."""
    assert len(vllm.tokens) == len(transformers.tokens) == NEW_TOKENS
    for step, (theirs, reference) in enumerate(zip(vllm.tokens, transformers.tokens, strict=True)):
        if theirs != reference:
            candidates = transformers.candidates[step]
            gap = candidates[reference] - candidates.get(theirs, float("-inf"))
            assert gap <= near_tie, f"step {step}: {theirs} instead of {reference}, gap {gap:.3f}"
            return
    # vLLM holds back the bytes of an unfinished character at the end.
    assert vllm.text.rstrip("\ufffd") == transformers.text.rstrip("\ufffd")


@pytest.mark.parametrize("case", WITH_MTP, ids=str)
def test_vllm_loads_the_mtp_head(case: Case, run: Run) -> None:
    """Names and shapes suit; drafting itself damages memory in vLLM 0.32.0's CPU build."""
    loaded(run.vllm[f"{case.name}-mtp"])
