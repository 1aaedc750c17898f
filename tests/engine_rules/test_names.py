"""Our tables of layers against the layers that the engines built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gguf2st.engines import ENGINES, Kind, partners, stacked
from gguf2st.errors import UnsupportedError
from tests.engine_rules.recorders.checkpoints import checkpoint
from tests.engine_rules.recorders.tiny import CONFIGS, DRAFTERS

Recording = Callable[[str], dict[str, Any]]
SERVERS = ("vllm", "sglang")
# Layers that have no weight, or none that the checkpoint holds as a linear layer.
ASIDE = {"Attention", "RadixAttention", "VocabParallelEmbedding"}
# models/siglip.py of vLLM quantizes an MLP only if its widths are multiples of 64.
CONDITIONAL = ("mlp.fc1", "mlp.fc2")


def _text(model_class: str) -> dict[str, Any]:
    config: dict[str, Any] = CONFIGS[model_class]
    return config.get("text_config", config)


def _asked(engine: str, about: dict[str, Any]) -> dict[str, Any]:
    return {
        prefix: facts
        for prefix, facts in about["layers"].items()
        if facts["class"] not in ASIDE and prefix
    }


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("model_class", CONFIGS)
def test_layers_are_those_that_the_engine_builds(
    engine: str, model_class: str, recording: Recording
) -> None:
    about = recording(engine)["layers"][model_class]
    assert about["class"] == model_class
    shapes = checkpoint(model_class)
    modules = ENGINES[engine].module_names(model_class, list(shapes))
    assert None not in modules.values()
    ours = {m.name: m for m in modules.values() if m is not None and not m.unquantized}
    asked = _asked(engine, about)
    conditional = {n for n in ours if n.endswith(CONDITIONAL)} if engine == "vllm" else set()
    assert set(ours) - conditional == set(asked) - {n for n in asked if "embed" in n}
    for name, facts in asked.items():
        assert ours[name].layer_class == facts["class"]
        if "out" in facts:
            matrix = stacked(ours[name], shapes, _text(model_class))
            assert (list(matrix.rows), matrix.columns) == (facts["out"], facts["in"])


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("model_class", DRAFTERS)
def test_drafters_are_those_that_the_engine_builds(
    engine: str, model_class: str, recording: Recording
) -> None:
    recorded = recording(engine)["layers"]
    if f"{model_class} drafter" not in recorded:
        pytest.skip("the engine has no drafter for it")
    about = recorded[f"{model_class} drafter"]
    shapes = checkpoint(model_class, drafter=True)
    modules = ENGINES[engine].module_names(model_class, list(shapes))
    ours = {m.name for m in modules.values() if m is not None and not m.unquantized}
    assert all(m is not None and m.drafter for m in modules.values())
    heads = {n for n, facts in about["layers"].items() if facts["class"] == "ParallelLMHead"}
    assert ours == set(_asked(engine, about)) - heads
    table = ENGINES[engine].table(model_class)  # type: ignore[attr-defined]
    assert {k: list(v) for k, v in table.drafter_packed.items()} == about["packed"]


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("model_class", CONFIGS)
def test_mappings_are_the_class_s(engine: str, model_class: str, recording: Recording) -> None:
    about = recording(engine)["layers"][model_class]
    table = ENGINES[engine].table(model_class)  # type: ignore[attr-defined]
    assert {k: list(v) for k, v in table.packed.items()} == about["packed"]
    # Mappers of inner classes come on top in vLLM; they must add nothing.
    mappers = about["mappers"] if engine == "vllm" else [about["mapper"]]
    for kind in ("substr", "prefix"):
        merged: dict[str, str] = {}
        for mapper in mappers:
            merged |= mapper.get(kind, {})
        assert dict(getattr(table.mapper, kind)) == merged
    assert all(set(m) <= {"substr", "prefix"} for m in mappers)


@pytest.mark.parametrize("model_class", CONFIGS)
def test_transformers_modules(model_class: str, recording: Recording) -> None:
    about = recording("hf")["layers"][model_class]
    shapes = checkpoint(model_class)
    modules = ENGINES["hf"].module_names(model_class, list(shapes))
    linear = {m.name: m for m in modules.values() if m and m.kind is not Kind.EXPERTS}
    built = {n: s for n, s in about["linear"].items() if n != "lm_head" or "lm_head" in shapes}
    assert {m.name: list(shapes[m.shards[0]]) for m in linear.values()} == built
    # What it has no module for: routers.
    assert all(name.endswith(".gate") for name, module in modules.items() if module is None)
    experts = {m.name: m for m in modules.values() if m and m.kind is Kind.EXPERTS}
    for module in experts.values():
        merges = any("*" in source for source in about["expert_sources"])
        assert bool(module.unquantized) is not merges


@pytest.mark.parametrize("model_class", CONFIGS)
def test_transformers_renames(model_class: str, recording: Recording) -> None:
    names = list(checkpoint(model_class))
    modules = ENGINES["hf"].module_names(model_class, names)
    for old, new in recording("hf")["layers"][model_class]["renamed"].items():
        module = modules.get(old)
        if module is not None:
            expected = new.partition(".experts.")[0] + ".experts" if ".experts." in new else new
            assert module.name == expected


def test_partners_are_joined_over_engines() -> None:
    names = [n for n in checkpoint("Qwen3_5ForCausalLM") if ".0." in n]
    groups = partners([ENGINES["vllm"], ENGINES["hf"]], "Qwen3_5ForCausalLM", names)
    leaves = [[n.rpartition(".")[2] for n in group] for group in groups]
    assert ["in_proj_qkv", "in_proj_z"] in leaves
    assert ["in_proj_b", "in_proj_a"] in leaves
    assert ["gate_proj", "up_proj"] in leaves
    assert ["down_proj"] in leaves


def test_all_experts_of_a_block_are_partners() -> None:
    names = list(checkpoint("MixtralForCausalLM"))
    groups = partners([ENGINES["hf"]], "MixtralForCausalLM", names)
    sizes = [len(g) for g in groups if ".experts." in g[0]]
    assert sizes == [12, 12]


def test_one_name_for_all_layers_makes_them_partners() -> None:
    """SGLang calls every layer of Gemma 2 the same, so no rule can tell them apart."""
    names = list(checkpoint("Gemma2ForCausalLM"))
    groups = partners([ENGINES["sglang"]], "Gemma2ForCausalLM", names)
    assert {len(g) for g in groups} == {2, 4, 6}


def test_unknown_class() -> None:
    with pytest.raises(UnsupportedError, match="FooForCausalLM"):
        ENGINES["vllm"].module_names("FooForCausalLM", ["a"])
