"""What `verify` says of broken checkpoints is what the engines do with them.

Each broken checkpoint of tests/verification is given to vLLM, SGLang (both load it and tell what they
leave unfilled; neither runs it) and transformers, which runs a prompt. "crash" has to be an exception,
"silently wrong" parameters that nothing was loaded into, everything else neither.

    python -m tests.engines.test_verdicts

writes what was seen into docs/verify.md.
"""

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import gguf2st
from tests.engines.agreement import IDS, TIMEOUT
from tests.engines.exchange import Job, Prompt, Result, ask
from tests.verification.cases import CASES, Broken
from tests.verification.documenting import DOCUMENT, rules_table
from tests.verification.editing import base, opened

RUNNING = [case for case in CASES if case.runs]
ENGINES = {"vllm": "run_vllm_loading", "sglang": "run_sglang", "hf": "run_transformers"}
# What the kernels do without, or what isn't loaded but made.
OPTIONAL = re.compile(r"\.(attn\.\w+|g_idx\w*|\w+_g_idx|\w+_g_idx_sort_indices|weight_shape)$")
# transformers needs gptqmodel for these, which isn't there.
NOT_IN_TRANSFORMERS = ("awq", "gptq")


@dataclass(frozen=True)
class Run:
    """What each engine said of each case, and what `verify` had said before."""

    seen: dict[str, dict[str, Result]]
    said: dict[str, dict[str, str]]


def ask_all(directory: Path) -> Run:
    jobs: dict[str, list[Job]] = {engine: [] for engine in ENGINES}
    said = {}
    for case in RUNNING:
        source = base(*case.base, **case.options)
        edit = opened(source)
        case.broken(edit)
        path = str(edit.write(directory / str(case), source))
        said[str(case)] = {v.engine: str(v.loading) for v in gguf2st.verify(path).verdicts}
        jobs["vllm"].append(Job(str(case), path, "bfloat16"))
        jobs["sglang"].append(Job(str(case), path, "auto"))
        if case.base[1] not in NOT_IN_TRANSFORMERS:
            jobs["hf"].append(Job(str(case), path, "float32", [Prompt(IDS)], 1))
    with ThreadPoolExecutor() as pool:
        futures = {
            engine: pool.submit(
                ask, f"tests.engines.{module}", jobs[engine], directory / f"{engine}.log", TIMEOUT
            )
            for engine, module in ENGINES.items()
        }
        seen = {engine: future.result() for engine, future in futures.items()}
    return Run(seen, said)


def behaviour(result: Result) -> tuple[str, str]:
    """What an engine did, as a verdict, and a few words of it."""
    if result.error:
        return "crashes", result.error.strip().splitlines()[-1]
    unfilled = [text for text in result.loading.get("unfilled", []) if not _optional(text)]
    keys = [*unfilled, *result.loading.get("missing_keys", [])]
    keys += [str(key) for key in result.loading.get("mismatched_keys", [])]
    if keys:
        return "silently wrong", f"nothing loaded into {keys[0].split()[0]}"
    return "loads", ""


def _optional(text: str) -> bool:
    return OPTIONAL.search(text.split(maxsplit=1)[0]) is not None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ask_all(tmp_path_factory.mktemp("verdicts"))


PAIRS = [
    (engine, case)
    for engine in ENGINES
    for case in RUNNING
    if not (engine == "hf" and case.base[1] in NOT_IN_TRANSFORMERS)
]


@pytest.mark.parametrize(("engine", "case"), PAIRS, ids=str)
def test_verdict(engine: str, case: Broken, run: Run) -> None:
    said = run.said[str(case)][engine]
    seen, words = behaviour(run.seen[engine][str(case)])
    if (engine, str(case)) in UNSEEN:
        pytest.skip(UNSEEN[engine, str(case)])
    said = "loads" if said.startswith("loads") else said
    assert said in ALIKE.get((engine, seen), {seen}), words


# Memory that nothing was loaded into may also hold what a kernel stumbles over: which of both
# happens is chance.
ALIKE = {("hf", "crashes"): {"crashes", "silently wrong"}}
# What the test bed can't show.
UNSEEN: dict[tuple[str, str], str] = {
    ("vllm", "D-09-narrow_projections_packed"): "kernels for CPUs don't pad to whole 32 rows",
    ("hf", "D-13-zero_points_unsaid"): "every parameter is filled; zero points are dropped",
    ("sglang", "D-09-narrow_projections_packed"): "the kernel that repacks them is a mock",
    ("sglang", "D-13-zero_points_unsaid"): "every parameter is filled; zero points are dropped",
    (
        "sglang",
        "D-25-width_of_another_model",
    ): "every parameter is filled, with parts of the matrices",
    (
        "vllm",
        "D-25-width_of_another_model",
    ): "every parameter is filled, with parts of the matrices",
}


SHORT = {"crashes": "crash", "silently wrong": "wrong", "loads": "loads"}


def seen_table(run: Run) -> str:
    lines = ["| rule | broken checkpoint | vLLM | SGLang | transformers |", "|---|---|---|---|---|"]
    for case in sorted(CASES, key=lambda case: (case.rule, case.name)):
        cells = []
        for engine in ENGINES:
            result = run.seen[engine].get(str(case))
            if result is None:
                cells.append(f"[{case.expect.get(engine, 'loads')}]".replace("silently ", ""))
                continue
            said, (seen, _) = run.said[str(case)][engine], behaviour(result)
            also = "" if SHORT[seen] == SHORT.get(said, "loads") else f" [{SHORT.get(said, said)}]"
            cells.append(SHORT[seen] + also)
        lines.append(f"| {case.rule} | {case.why.splitlines()[0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def document(run: Run) -> None:
    text = DOCUMENT.read_text()
    for name, table in (("rules", rules_table()), ("seen", seen_table(run))):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = before + start + table + "\n" + end + rest.partition(end)[2]
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        answers = ask_all(Path(folder))
    document(answers)
    for engine, case in PAIRS:
        seen, words = behaviour(answers.seen[engine][str(case)])
        print(
            f"{engine:7} {case!s:50} {answers.said[str(case)][engine]:25} {seen:15} {words[:100]}"
        )
