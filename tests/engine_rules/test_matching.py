"""Our reading of random configurations against the engines' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gguf2st.engines import ENGINES, Checkpoint, Kind, Outcome
from gguf2st.engines.vllm.matching import rename, rename_target
from gguf2st.engines.vllm.models import MODELS
from tests.engine_rules.recorders.cases import Case, cases
from tests.engine_rules.recorders.checkpoints import checkpoint
from tests.engine_rules.recorders.write import digest

Recording = Callable[[str], dict[str, Any]]
SERVERS = ("vllm", "sglang")
CASES = list(cases())


def _code(outcome: Outcome, case: Case) -> str:
    if outcome.error:
        return "!"
    if outcome.scheme is None:
        return "-"
    return str(outcome.scheme.bits if case.method == "gptq" else outcome.scheme.group_size)


def _answers(recorded: dict[str, Any], number: int) -> dict[str, str]:
    assert recorded["cases"] == digest(), "the cases have changed: run the recorders again"
    names = recorded["asked"][CASES[number].key]
    return dict(zip(names, recorded["answers"][number].split(), strict=True))


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("method", ["compressed-tensors", "awq", "fp8", "gptq"])
def test_decisions_are_the_engine_s(engine: str, method: str, recording: Recording) -> None:
    recorded, asked, kinds = recording(engine), 0, set()
    for number, case in enumerate(CASES):
        if case.method != method:
            continue
        answers = _answers(recorded, number)
        names = list(checkpoint(case.model_class))
        modules = ENGINES[engine].module_names(case.model_class, names)
        given = Checkpoint(frozenset(case.quantized), [f"{n}.weight" for n in names])
        for module in {m.name: m for m in modules.values() if m is not None}.values():
            if module.name not in answers:
                continue
            outcome = ENGINES[engine].outcome(case.model_class, module, case.config, given)
            code = _code(outcome, case)
            assert code == answers[module.name], (case, module, outcome)
            asked += 1
            kinds.add(code)
    assert asked > 1000
    # The cases must tell something: all answers occur.
    assert len(kinds) > 1


@pytest.mark.parametrize("engine", SERVERS)
def test_partly_ignored_layers_occur(engine: str, recording: Recording) -> None:
    assert any("!" in row for row in recording(engine)["answers"])


@pytest.mark.parametrize("method", ["compressed-tensors", "awq", "fp8"])
def test_decisions_are_transformers_s(method: str, recording: Recording) -> None:
    recorded, asked = recording("hf"), 0
    for number, case in enumerate(CASES):
        if case.method != method:
            continue
        answers = _answers(recorded, number)
        names = list(checkpoint(case.model_class))
        modules = ENGINES["hf"].module_names(case.model_class, names)
        given = Checkpoint(frozenset(names))
        for module in {m.name: m for m in modules.values() if m is not None}.values():
            if module.unquantized or (method == "awq" and module.kind is Kind.EXPERTS):
                continue
            one = method == "compressed-tensors" and module.kind is Kind.EXPERTS
            outcome = ENGINES["hf"].outcome(case.model_class, module, case.config, given)
            assert _code(outcome, case) == answers["experts" if one else module.name], (
                case,
                module,
            )
            asked += 1
    assert asked > 1000


def test_vllm_renames_paths_and_nothing_else() -> None:
    """CompressedTensorsConfig.apply_vllm_mapper; AWQ and fp8 rename every entry."""
    mixtral = MODELS["MixtralForCausalLM"].mapper
    assert rename_target("re:.*.gate_proj.?$", mixtral) == "re:.*.gate_proj.?$"
    assert rename_target("a.gate_proj.b", mixtral) == "a.w1.b"
    qwen = MODELS["Qwen3_5ForConditionalGeneration"].mapper
    assert rename_target("lm_head", qwen) == rename("lm_head", qwen) == "lm_head"
    assert rename("lm_head.x", qwen) == "language_model.lm_head.x"
