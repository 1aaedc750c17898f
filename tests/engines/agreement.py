"""What the tests of engines share: prompts, running both engines at once, comparing their answers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.exchange import REPOSITORY, Answer, Job, Prompt, Result, ask

FIXTURES = REPOSITORY / "fixtures"
NEW_TOKENS = 12
TIMEOUT = 1800.0  # seconds for an engine to do all jobs: some minutes on two idle cores
IDS = [39, 68, 75, 290, 296, 268, 309, 111, 275, 310, 105, 297, 220, 46, 47, 48]
QUESTION = "What's in 3 pictures?"
IMAGES_ONLY = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_mm_profiling": True}
DRAFTING = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def ask_both(
    vllm: list[Job], transformers: list[Job], directory: Path
) -> tuple[dict[str, Result], dict[str, Result]]:
    """Give vLLM's jobs and transformers' to one process of each; logs go to the directory."""
    with ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(
                ask, f"tests.engines.run_{engine}", jobs, directory / f"{engine}.log", TIMEOUT
            )
            for engine, jobs in (("vllm", vllm), ("transformers", transformers))
        ]
        return futures[0].result(), futures[1].result()


def loaded(result: Result) -> Result:
    """Pass a result that isn't an error."""
    if result.error:
        pytest.fail(result.error, pytrace=False)
    return result


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


def check_greedy(vllm: Answer, transformers: Answer, near_tie: float) -> None:
    """Compare up to the first difference, which has to be a near-tie; the rest has other prefixes."""
    assert len(vllm.tokens) == len(transformers.tokens) == NEW_TOKENS
    for step, (theirs, reference) in enumerate(zip(vllm.tokens, transformers.tokens, strict=True)):
        if theirs != reference:
            candidates = transformers.candidates[step]
            gap = candidates[reference] - candidates.get(theirs, float("-inf"))
            assert gap <= near_tie, f"step {step}: {theirs} instead of {reference}, gap {gap:.3f}"
            return
    # vLLM holds back what may still become another character.
    assert transformers.text.startswith(vllm.text.rstrip("\ufffd"))
