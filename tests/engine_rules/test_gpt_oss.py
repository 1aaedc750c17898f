"""gpt-oss, whose experts the engines read stacked: their layers, and what they make of a config.

The layers are those that the recorders found in vLLM 0.32.0, SGLang 0.5.23 and transformers 5.19.0
for a model of these widths.
"""

from __future__ import annotations

import pytest

from gguf2st.engines import ENGINES, Deployment, EngineRules, Kind, contradictions, stacked
from gguf2st.targets import Quantized, Scheme, TargetOptions, target_named

MODEL = "GptOssForCausalLM"
CONFIG = {"head_dim": 64, "num_attention_heads": 64}
TARGET = target_named("mxfp4", TargetOptions(variant="native"))
(SCHEME,) = TARGET.schemes()
BLOCKS = (0, 1)
ATTENTION = {"q_proj": (4096, 2880), "k_proj": (512, 2880), "v_proj": (512, 2880)}
SHAPES = {
    name: shape
    for block in BLOCKS
    for name, shape in {
        **{f"model.layers.{block}.self_attn.{leaf}": shape for leaf, shape in ATTENTION.items()},
        f"model.layers.{block}.self_attn.o_proj": (2880, 4096),
        f"model.layers.{block}.mlp.router": (32, 2880),
        f"model.layers.{block}.mlp.experts.gate_up_proj": (5760, 2880),
        f"model.layers.{block}.mlp.experts.down_proj": (2880, 2880),
    }.items()
} | {"lm_head": (201088, 2880)}
EXPERTS = [name for name in SHAPES if ".experts." in name]
OTHERS = [name for name in SHAPES if ".experts." not in name]
# What asks for a quantization method in the first block, with its class and widths.
ASKED = {
    "vllm": {
        "model.layers.0.attn.qkv_proj": ("QKVParallelLinear", (4096, 512, 512)),
        "model.layers.0.attn.o_proj": ("RowParallelLinear", (2880,)),
        "model.layers.0.mlp.experts": ("GptOssRoutedExperts", (2880, 2880)),
    },
    "sglang": {"model.layers.0.mlp.experts": ("FusedMoE", (2880, 2880))},
    "hf": {
        "model.layers.0.self_attn.q_proj": ("Linear", (4096,)),
        "model.layers.0.self_attn.k_proj": ("Linear", (512,)),
        "model.layers.0.self_attn.v_proj": ("Linear", (512,)),
        "model.layers.0.self_attn.o_proj": ("Linear", (2880,)),
        "model.layers.0.mlp.experts": ("Experts", (2880, 2880)),
        "lm_head": ("Linear", (201088,)),
    },
}


def config(experts: list[str] = EXPERTS) -> dict:
    modules = [Quantized(name, SHAPES[name], SCHEME, experts=32) for name in experts]
    return TARGET.quantization_config(modules, OTHERS)


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_are_those_that_the_engine_builds(engine: str) -> None:
    names = [name for name in SHAPES if ".layers.1." not in name]
    modules = ENGINES[engine].module_names(MODEL, names).values()
    asking = {m.name: m for m in modules if m is not None and not m.unquantized}
    assert {
        name: (module.layer_class, stacked(module, SHAPES, CONFIG).rows)
        for name, module in asking.items()
    } == ASKED[engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_native_layout_agrees_with_itself(engine: str) -> None:
    assert (
        contradictions(ENGINES[engine], MODEL, dict.fromkeys(EXPERTS, SCHEME), OTHERS, config())
        == []
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_experts_without_codes_contradict_it(engine: str) -> None:
    (first, *_) = found = contradictions(
        ENGINES[engine], MODEL, dict.fromkeys(EXPERTS[:2], SCHEME), EXPERTS[2:] + OTHERS, config()
    )
    assert len(found) == 1
    assert "model.layers.1.mlp.experts" in first


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_attention_with_codes_contradicts_it(engine: str) -> None:
    names = dict.fromkeys([*EXPERTS, "model.layers.0.self_attn.o_proj"], SCHEME)
    others = [name for name in OTHERS if name not in names]
    assert contradictions(ENGINES[engine], MODEL, names, others, config())


def test_every_engine_takes_the_published_widths_at_every_size() -> None:
    deployment = Deployment(tensor_parallel=(1, 2, 4, 8))
    rules = EngineRules(list(ENGINES.values()), MODEL, "mxfp4", deployment, CONFIG)
    assert not rules.unknown
    assert rules.target_refusals([SCHEME], experts=True) == {}
    for name in EXPERTS:
        assert rules.refusal({name: SHAPES[name]}, SCHEME) is None
    older = EngineRules(
        list(ENGINES.values()), MODEL, "mxfp4", Deployment(compute_capability=75), CONFIG
    )
    assert set(older.target_refusals([SCHEME], experts=True)) == {"vLLM", "SGLang"}


def test_exceptions_are_the_published_ones() -> None:
    assert set(config()["modules_to_not_convert"]) == {
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "lm_head",
    }
    assert str(SCHEME) == "mxfp4 g32 stacked"
    assert Scheme("mxfp4", 4, 32) != SCHEME
    assert {m.kind for m in ENGINES["vllm"].module_names(MODEL, EXPERTS).values() if m} == {
        Kind.EXPERTS
    }
