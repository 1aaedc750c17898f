"""The model that most users bring, at its real size: planned with all its tensors, none read."""

import json
from itertools import pairwise

import pytest

import gguf2st
from benchmarks.headline import write_model, write_projector
from gguf2st.engines import ENGINES, contradictions
from gguf2st.gguf import GgufModel
from gguf2st.targets import Scheme, TargetOptions

MODEL_CLASS = "Qwen3_5ForConditionalGeneration"
INT4, INT8 = Scheme("int", 4, 128), Scheme("int", 8, 128)
FORMATS = {
    "awq": (TargetOptions(), Scheme("int", 4, 128, symmetric=False)),
    "ct": (TargetOptions(), INT4),
    "ct8": (TargetOptions(bits=8), INT8),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GgufModel:
    directory = tmp_path_factory.mktemp("headline")
    model = write_model(directory / "model.gguf")
    mmproj = write_projector(directory / "mmproj.gguf")
    return gguf2st.open_model(model, mmproj)


@pytest.mark.parametrize("name", FORMATS)
def test_the_plan_of_866_tensors(name: str, model: GgufModel) -> None:
    target, scheme = FORMATS[name]
    options = gguf2st.PlanOptions(
        to=name.rstrip("8"),
        target=target,
        engines=("vllm", "sglang", "hf"),
        tensor_parallel=(1, 2),
    )
    plan = gguf2st.make_plan(model, options)
    assert plan.model_class == MODEL_CLASS
    assert plan.components() == {"text": 851, "mtp": 15, "vision": 333}
    assert plan.peak_memory < 500e6
    # 48 blocks of gated delta nets have qkv, z and out to quantize, 16 of attention q, k, v and o,
    # and all of them gate, up and down.
    assert len(plan.modules) == 48 * 3 + 16 * 4 + 64 * 3
    config = json.loads(plan.documents["config.json"])
    assert config["text_config"]["mtp_num_hidden_layers"] == 1

    # Engines' rules on what the shards' headers will say, whatever the plan thinks of it.
    names = [placement.spec.name for placement in plan.placements]
    matrices = {p.spec.name for p in plan.placements if len(p.spec.shape) == 2}
    quantized, unquantized = {}, []
    for tensor in names:
        module, _, leaf = tensor.rpartition(".")
        if leaf in ("qweight", "weight_packed"):
            quantized[module] = scheme
        elif leaf == "weight" and tensor in matrices:
            unquantized.append(module)
    assert len(quantized) == 400
    for engine in ENGINES.values():
        found = contradictions(
            engine, MODEL_CLASS, quantized, unquantized, config["quantization_config"]
        )
        assert found == []


def test_budgets_and_levels(model: GgufModel) -> None:
    """A plan uses its budget, and all engines read each matrix as it is written."""
    plans = []
    for choice in (
        {"bits_per_weight": 5.7},
        {"quality": 1},
        {"bits_per_weight": 6.5},
        {"quality": 3},
    ):
        options = gguf2st.PlanOptions(to="ct", tensor_parallel=(1, 2), **choice)
        plan = gguf2st.make_plan(model, options)
        if wanted := choice.get("bits_per_weight"):
            assert 0.995 * wanted < plan.bits_per_weight <= wanted
        specs = {placement.spec.name: placement.spec for placement in plan.placements}
        quantized, unquantized = {}, []
        for name, spec in specs.items():
            module, _, leaf = name.rpartition(".")
            if leaf == "weight_packed":
                columns = plan_columns(plan, module)
                groups = specs[f"{module}.weight_scale"].shape[1]
                quantized[module] = Scheme("int", 32 * spec.shape[1] // columns, columns // groups)
            elif leaf == "weight" and len(spec.shape) == 2:
                unquantized.append(module)
        config = json.loads(plan.documents["config.json"])["quantization_config"]
        for engine in ENGINES.values():
            assert contradictions(engine, MODEL_CLASS, quantized, unquantized, config) == []
        plans.append(quantized)
    assert len(plans[0]) == 400
    for coarse, fine in pairwise(plans):
        assert all(
            (fine[n].bits, -fine[n].group_size) >= (coarse[n].bits, -coarse[n].group_size)
            for n in coarse
        )


def plan_columns(plan: gguf2st.Plan, name: str) -> int:
    return next(m.module.shape[1] for m in plan.modules if m.module.name == name)
