"""Contradictions between a config and what was written: real formats, and stories that went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gguf2st.engines import (
    ENGINES,
    Deployment,
    EngineRules,
    contradictions,
    partners,
    quant_method,
)
from gguf2st.targets import Quantized, Scheme, TargetOptions, target_named
from tests.engine_rules.recorders.checkpoints import checkpoint
from tests.engine_rules.recorders.tiny import CONFIGS, DRAFTERS

INT4 = Scheme("int", 4, 128)
VL = "Qwen3_5ForConditionalGeneration"
KEPT = (".gate", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba", "lm_head")
FORMATS = [
    ("compressed-tensors", TargetOptions()),
    ("awq", TargetOptions()),
    ("gptq", TargetOptions()),
    ("fp8", TargetOptions(variant="block")),
    ("fp8", TargetOptions(variant="channel")),
    ("w8a8", TargetOptions()),
    ("nvfp4", TargetOptions()),
    ("mxfp4", TargetOptions()),
]


def _kept(name: str) -> bool:
    return name.endswith(KEPT) or "vis" in name or name.startswith("mtp")


def _names(model_class: str) -> list[str]:
    names = list(checkpoint(model_class))
    return names + (list(checkpoint(model_class, drafter=True)) if model_class in DRAFTERS else [])


def _known(engine: str, target: str, model_class: str) -> bool:
    """Engines that can't load such a checkpoint, which `target_refusal` says beforehand."""
    experts = any(".experts." in name for name in checkpoint(model_class))
    scheme = target_named(target).schemes()[0]
    method = quant_method(target, scheme)
    return bool(
        ENGINES[engine].target_refusal(model_class, method, scheme, Deployment(), experts=experts)
    )


@pytest.mark.parametrize(
    ("target", "options"), FORMATS, ids=[f"{t}-{o.variant}" for t, o in FORMATS]
)
@pytest.mark.parametrize("model_class", CONFIGS)
@pytest.mark.parametrize("part", ["all", "some"])
def test_what_formats_write_is_what_engines_read(
    target: str, options: TargetOptions, model_class: str, part: str
) -> None:
    if part == "some" and model_class == "Gemma2ForCausalLM":
        pytest.skip("SGLang can't tell its layers apart")
    fmt = target_named(target, options)
    scheme = fmt.schemes()[0]
    left_out = ("layers.0.self_attn", "layers.0.linear_attn", "layers.1.mlp.down_proj")
    quantized = {
        name: scheme
        for name in _names(model_class)
        if not _kept(name) and not (part == "some" and any(x in name for x in left_out))
    }
    unquantized = [name for name in _names(model_class) if name not in quantized]
    config = fmt.quantization_config(
        [Quantized(name, (256, 256), s) for name, s in quantized.items()], unquantized
    )
    assert config is not None
    for name, engine in ENGINES.items():
        if not _known(name, target, model_class):
            assert contradictions(engine, model_class, quantized, unquantized, config) == []


def _story(ignore: list[str], **changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignore,
    } | changes


def _problems(engine: str, config: Mapping[str, Any], model_class: str = VL) -> str:
    names = list(checkpoint(model_class))
    quantized = {name: INT4 for name in names if not _kept(name)}
    unquantized = [name for name in names if name not in quantized]
    return "\n".join(contradictions(ENGINES[engine], model_class, quantized, unquantized, config))


LEAVES = [name for name in checkpoint(VL) if _kept(name)]
HEAD_AND_VISION = ["re:.*lm_head$", "re:.*visual.*"]
P = "model.language_model.layers.0.linear_attn."


@pytest.mark.parametrize("engine", ENGINES)
def test_full_names_of_all_shards_are_enough(engine: str) -> None:
    assert _problems(engine, _story(LEAVES)) == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_prefix_matches_nothing(engine: str) -> None:
    wrong = [name.replace("model.language_model.", "model.") for name in LEAVES]
    assert "in_proj_" in _problems(engine, _story(wrong))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parent_matches_nothing(engine: str) -> None:
    entries = [P.removesuffix("."), *HEAD_AND_VISION]
    assert "in_proj_" in _problems(engine, _story(entries))


def test_short_names_work_in_sglang_only() -> None:
    entries = ["linear_attn.in_proj_a", "linear_attn.in_proj_b", *HEAD_AND_VISION]
    assert _problems("sglang", _story(entries)) == ""
    assert "in_proj_ba" in _problems("vllm", _story(entries))
    assert "in_proj_a" in _problems("hf", _story(entries))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_one_shard_alone_is_refused(engine: str) -> None:
    assert "some but not all" in _problems(engine, _story([f"{P}in_proj_a", *HEAD_AND_VISION]))


def test_anchored_expressions_are_dead_in_vllm() -> None:
    entries = [*(name for name in LEAVES if "visual" not in name), "re:model.visual.*"]
    assert "visual" in _problems("vllm", _story(entries))
    assert _problems("hf", _story(entries)) == ""


def test_second_group_needs_the_fused_name_in_sglang() -> None:
    """SGLang tries the class before it takes a fused name apart."""
    two = _story(LEAVES)
    one = two["config_groups"]["group_0"]
    narrow = {"targets": ["re:.*in_proj_(qkv|z)$"], "weights": one["weights"] | {"group_size": 32}}
    two["config_groups"]["group_1"] = narrow
    names = list(checkpoint(VL))
    small = Scheme("int", 4, 32)
    quantized = {
        n: small if n.endswith(("in_proj_qkv", "in_proj_z")) else INT4
        for n in names
        if not _kept(n)
    }
    unquantized = [n for n in names if n not in quantized]
    assert contradictions(ENGINES["vllm"], VL, quantized, unquantized, two) == []
    assert "in_proj_qkvz" in contradictions(ENGINES["sglang"], VL, quantized, unquantized, two)[0]
    narrow["targets"] = ["re:.*in_proj_(qkvz|qkv|z)$"]
    assert contradictions(ENGINES["sglang"], VL, quantized, unquantized, two) == []


def test_fused_partners_with_two_schemes() -> None:
    names = list(checkpoint("LlamaForCausalLM"))
    quantized = {n: INT4 for n in names if n != "lm_head"}
    quantized["model.layers.0.self_attn.v_proj"] = Scheme("int", 8, 128)
    found = contradictions(
        ENGINES["vllm"], "LlamaForCausalLM", quantized, ["lm_head"], _story(["lm_head"])
    )
    assert any("one matrix" in sentence for sentence in found)


def test_quantized_vision_is_dropped_by_sglang() -> None:
    names = list(checkpoint(VL))
    quantized = {n: INT4 for n in names if not _kept(n) or "visual" in n}
    unquantized = [n for n in names if n not in quantized]
    found = contradictions(ENGINES["sglang"], VL, quantized, unquantized, _story(unquantized))
    assert all("visual" in sentence and "without quantization" in sentence for sentence in found)
    assert found


def test_empty_awq_list_in_vllm() -> None:
    """vLLM derives it from the tensors, and A_log makes an exception of the whole block."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    names = list(checkpoint(VL))
    scheme = Scheme("int", 4, 128, symmetric=False)
    quantized = {n: scheme for n in names if not _kept(n)}
    unquantized = [n for n in names if n not in quantized]
    plain = [f"{n}.weight" for n in unquantized]
    tensors = [*plain, f"{P}A_log"]
    found = contradictions(ENGINES["vllm"], VL, quantized, unquantized, awq, tensors)
    assert any("linear_attn.out_proj" in sentence for sentence in found)
    found = contradictions(ENGINES["vllm"], VL, quantized, unquantized, awq, plain)
    assert not any("linear_attn.out_proj" in sentence for sentence in found)


def test_router_of_qwen3_moe_must_be_ignored_in_vllm() -> None:
    """Qwen3-MoE's router asks for quantization; that of Qwen2-MoE doesn't."""
    config = _story(["lm_head", "re:.*shared_expert_gate$"])
    assert "mlp.gate" in _problems("vllm", config, "Qwen3MoeForCausalLM")
    assert _problems("vllm", config, "Qwen2MoeForCausalLM") == ""


def test_top_level_format_for_experts_in_sglang() -> None:
    config = _story(["lm_head", "re:.*gate$"], format="mixed-precision")
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    assert "at the top" in _problems("sglang", config, "Qwen3MoeForCausalLM")
    assert _problems("vllm", config, "Qwen3MoeForCausalLM") == ""


def test_status_for_transformers() -> None:
    config = _story(["lm_head"], quantization_status="frozen")
    assert "quantization_status" in _problems("hf", config, "LlamaForCausalLM")


def test_drafters_are_reported_apart() -> None:
    names = [*checkpoint(VL), *checkpoint(VL, drafter=True)]
    quantized = {n: INT4 for n in names if not _kept(n)}
    unquantized = [n for n in names if n not in quantized]
    config = _story(LEAVES)
    engine = ENGINES["vllm"]
    assert contradictions(engine, VL, quantized, unquantized, config) == []
    found = contradictions(engine, VL, quantized, unquantized, config, drafter=True)
    assert any("mtp.fc" in sentence for sentence in found)
    config["ignore"] = [*LEAVES, "re:^mtp.*"]
    assert contradictions(engine, VL, quantized, unquantized, config, drafter=True) == []


def test_rules_of_all_engines_together() -> None:
    text = CONFIGS[VL]["text_config"] | {"linear_num_value_heads": 48}
    rules = EngineRules(
        list(ENGINES.values()), VL, "compressed-tensors", Deployment(), {"text_config": text}
    )
    ba = {f"{P}in_proj_b": (48, 5120), f"{P}in_proj_a": (48, 5120)}
    assert "SGLang" in (rules.refusal(ba, INT4) or "")
    mlp = {
        "model.language_model.layers.0.mlp.gate_proj": (17408, 5120),
        "model.language_model.layers.0.mlp.up_proj": (17408, 5120),
    }
    assert rules.refusal(mlp, INT4) is None
    assert rules.shape_notes(mlp, INT4) == []
    assert "vision" in (rules.never("model.visual.blocks.0.attn.qkv") or "")
    assert rules.never(f"{P}out_proj") is None
    assert rules.target_refusals([INT4], experts=False) == {}
    assert list(rules.target_refusals([Scheme("mxfp4", 4, 32)], experts=False)) == ["SGLang"]
    assert rules.partners(list(ba)) == [list(ba)]


def test_shared_expert_of_qwen3_next_is_one_more_expert_in_sglang() -> None:
    model = "Qwen3NextForCausalLM"
    names = list(checkpoint(model))
    groups = partners([ENGINES["sglang"]], model, names)
    (group,) = [g for g in groups if "model.layers.0.mlp.experts.0.up_proj" in g]
    assert "model.layers.0.mlp.shared_expert.down_proj" in group
    quantized = {n: INT4 for n in names if not _kept(n) and "shared_expert" not in n}
    unquantized = [n for n in names if n not in quantized]
    fused = ["re:.*mlp.shared_expert.gate_up_proj$"]
    config = _story([*unquantized, *fused])
    found = contradictions(ENGINES["sglang"], model, quantized, unquantized, config)
    assert any("joins" in sentence for sentence in found)
    assert contradictions(ENGINES["vllm"], model, quantized, unquantized, config) == []


def test_engines_that_do_not_know_a_class_are_named() -> None:
    rules = EngineRules(list(ENGINES.values()), "NewForCausalLM", "awq", Deployment(), {})
    assert rules.unknown == ["vLLM", "SGLang", "transformers"]
    assert rules.refusal({"model.layers.0.mlp.down_proj": (64, 64)}, INT4) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moe_of_sglang_at_many_ranks(dtype: str) -> None:
    """35B-A3B: experts of 512, which 8 ranks leave 64 columns."""
    model = "Qwen3_5MoeForCausalLM"
    rules = EngineRules(
        [ENGINES["sglang"]],
        model,
        "compressed-tensors",
        Deployment((8,), dtype=dtype),
        CONFIGS[model],
    )
    own = "model.layers.0.mlp.experts.0."
    shapes = {
        f"{own}gate_proj": (512, 2048),
        f"{own}up_proj": (512, 2048),
        f"{own}down_proj": (2048, 512),
    }
    assert "tensor parallel 8" in (rules.refusal(shapes, INT4) or "")
    assert rules.refusal(shapes, Scheme("int", 4, 32)) is None


def test_vllm_quantizes_experts_that_gptq_excepts() -> None:
    """Seen with CUDA vLLM 0.26: "'RoutedExperts' object has no attribute 'w2_weight'"."""
    model_class = "Qwen3MoeForCausalLM"
    names = [name for name in checkpoint(model_class) if not _kept(name)]
    experts = [name for name in names if ".experts." in name]
    others = {name: INT4 for name in names if ".experts." not in name}
    target = target_named("gptq")
    config = target.quantization_config(
        [Quantized(name, (256, 256), scheme) for name, scheme in others.items()], experts
    )
    assert config is not None
    found = contradictions(ENGINES["vllm"], model_class, others, experts, config)
    assert found and all("can't except" in problem for problem in found)
