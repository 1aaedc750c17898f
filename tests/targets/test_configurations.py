"""What a configuration says about each module, read by each engine's rules."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

import pytest

from gguf2st.errors import UnsupportedError, VerificationError
from gguf2st.targets import Quantized, Scheme, TargetOptions, target_named
from tests.targets.models import MODELS, Model, nothing, qwen3, qwen3_moe
from tests.targets.readers import READERS

FORMATS = {
    "ct": ("ct", {}),
    "ct 8 channel": ("ct", {"bits": 8, "group_size": 0}),
    "ct asymmetric": ("ct", {"symmetric": False, "group_size": 32}),
    "awq": ("awq", {}),
    "awq 32": ("awq", {"group_size": 32, "symmetric": True}),
    "gptq": ("gptq", {}),
    "gptq 8 channel": ("gptq", {"bits": 8, "group_size": 0}),
    "fp8": ("fp8", {}),
    "fp8 block": ("fp8", {"variant": "block"}),
    "w8a8": ("w8a8", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
}
SHAPE = (256, 256)


def configured(
    name: str, options: dict[str, Any], model: Model
) -> tuple[dict[str, Any], list[Quantized]]:
    target = target_named(name, TargetOptions(**options))
    modules = [Quantized(n, SHAPE, target.schemes_for(n)[0]) for n in model.quantized]
    config = target.quantization_config(modules, model.unquantized)
    assert config is not None
    return json.loads(json.dumps(config)), modules


# One for each way of listing modules
LISTS = ("ct asymmetric", "awq 32", "gptq", "fp8 block")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("engine", READERS)
@pytest.mark.parametrize(("name", "options"), [FORMATS[name] for name in LISTS], ids=LISTS)
def test_engines_agree_with_what_is_written(
    name: str, options: dict[str, Any], engine: str, model: Model
) -> None:
    config, modules = configured(name, options, model)
    found = READERS[engine](config, model)
    group = options.get("group_size")
    for module in modules:
        if module.name not in found:
            continue
        assert found[module.name] is not None, module.name
        if group:
            assert found[module.name] == (module.scheme.bits, group)
    for unquantized in model.unquantized:
        if (name, engine) == ("gptq", "sglang") and ".experts." in unquantized:
            continue  # SGLang can't be told; the plan must not ask for it
        assert found.get(unquantized) is None, unquantized
    assert len(found) > len(model.quantized) / 2 or engine == "hf"


def schemes_by_module(model: Model, choose: Any) -> list[Quantized]:
    return [Quantized(name, SHAPE, choose(name)) for name in model.quantized]


SMALL, LARGE, EIGHT = Scheme("int", 4, 32), Scheme("int", 4, 128), Scheme("int", 8, 128)
MIXES = {
    "down": lambda n: SMALL if n.endswith("down_proj") and ".experts." not in n else LARGE,
    "attention": lambda n: EIGHT if "_attn." in n else LARGE,
    "one block": lambda n: EIGHT if ".layers.3." in n else LARGE,
    "three": lambda n: SMALL if ".layers.10." in n else EIGHT if "_attn." in n else LARGE,
    "experts": lambda n: SMALL if ".experts." in n else LARGE,
    "experts of a block": lambda n: SMALL if ".experts." in n and ".layers.1." in n else LARGE,
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("engine", READERS)
def test_mixed_schemes(mix: str, model: Model, engine: str) -> None:
    modules = schemes_by_module(model, MIXES[mix])
    config = target_named("ct").quantization_config(modules, model.unquantized)
    assert config is not None
    assert config["format"] == "pack-quantized"
    found = READERS[engine](json.loads(json.dumps(config)), model)
    for module in modules:
        if module.name in found:
            assert found[module.name] == (module.scheme.bits, module.scheme.group_size), module.name
    for name in model.unquantized:
        assert found.get(name) is None, name
    groups = list(config["config_groups"].values())
    assert groups[0]["targets"][0] == "Linear"
    assert all("Linear" not in group["targets"] for group in groups[1:])


@pytest.mark.parametrize(("name", "options"), FORMATS.values(), ids=FORMATS)
def test_every_name_is_listed(name: str, options: dict[str, Any]) -> None:
    model = MODELS["qwen3_5, ends kept"]
    config, _ = configured(name, options, model)
    if "dynamic" in config:
        patterns = [re.compile(key.removeprefix("-:")) for key in config["dynamic"]]
        assert all(any(p.match(n) for p in patterns) for n in model.unquantized)
        assert not any(p.match(n) for p in patterns for n in model.quantized)
        return
    listed = set(config.get("ignore", config.get("modules_to_not_convert")))
    assert set(model.unquantized) <= listed
    # Joined ones, for model classes that don't say of what they consist.
    block = "model.language_model.layers.0"
    assert f"{block}.linear_attn.in_proj_ba" in listed
    assert f"{block}.mlp.gate_up_proj" in listed
    assert "model.language_model.layers.1.mlp.gate_up_proj" not in listed
    assert len(listed) == len(config.get("ignore", config.get("modules_to_not_convert")))


def test_expressions_are_few_and_general() -> None:
    config, _ = configured("ct", {}, MODELS["qwen3_5_moe, some experts kept"])
    expressions = [entry for entry in config["ignore"] if entry.startswith("re:")]
    assert sorted(expressions) == sorted(
        [
            r"re:.*lm_head$",
            r"re:(.*\.)?(mtp|visual)(\..*)?$",
            r"re:.*language_model\.embed_tokens$",
            r"re:.*linear_attn\.(in_proj_b|in_proj_a|in_proj_ba)$",
            r"re:.*mlp\.(gate|shared_expert_gate)$",
            r"re:(.*\.)?layers\.(1|10)\.mlp\.experts(\..*)?$",
        ]
    )
    # Single experts would bury the rest.
    assert not any(".experts." in e for e in config["ignore"] if not e.startswith("re:"))


def test_awq_never_lists_a_router_that_is_part_of_a_quantized_name() -> None:
    model = qwen3_moe(nothing)
    model.unquantized.append("model.layers.0.mlp.gate")  # beside a quantized gate_proj
    config, _ = configured("awq", {}, model)
    assert "model.layers.0.mlp.gate" not in config["modules_to_not_convert"]
    for entry in config["modules_to_not_convert"]:
        assert not any(entry in name for name in model.quantized)
        assert entry not in "model.layers.0.mlp.gate_up_proj"
    assert "model.layers.1.mlp.gate" in config["modules_to_not_convert"]


def test_awq_refuses_what_substrings_cannot_say() -> None:
    target = target_named("awq")
    module = Quantized("model.layers.0.mlp.fc10", SHAPE, target.schemes()[0])
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.fc1 can't stay"):
        target.quantization_config([module], ["model.layers.0.mlp.fc1"])


def test_awq_list_is_never_empty() -> None:
    target = target_named("awq")
    module = Quantized("model.layers.0.mlp.down_proj", SHAPE, target.schemes()[0])
    config = target.quantization_config([module], [])
    assert config is not None
    assert config["modules_to_not_convert"] == ["lm_head"]
    assert config["zero_point"] is True


@pytest.mark.parametrize("name", ["ct", "awq", "gptq", "w8a8"])
def test_divided_partners_are_noticed(name: str) -> None:
    target = target_named(name)
    block = "model.layers.0.self_attn"
    modules = [Quantized(f"{block}.{x}_proj", SHAPE, target.schemes()[0]) for x in "qk"]
    with pytest.raises(VerificationError, match=r"qkv_proj"):
        target.quantization_config(modules, [f"{block}.v_proj"])


def test_a_quantized_head_is_named() -> None:
    model = qwen3(nothing)
    model.unquantized.remove("lm_head")
    model.quantized.append("lm_head")
    config, _ = configured("ct", {}, model)
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head$"]
    assert not any("lm_head" in entry for entry in config["ignore"])
    assert configured("gptq", {}, model)[0]["lm_head"] is True
    assert configured("awq", {}, model)[0]["lm_head"] is True
    modules = schemes_by_module(model, lambda n: EIGHT if n == "lm_head" else LARGE)
    mixed = target_named("ct").quantization_config(modules, model.unquantized)
    assert mixed is not None
    assert mixed["config_groups"]["group_1"]["targets"] == ["re:.*lm_head$"]


def test_w4afp8() -> None:
    target = target_named("w4afp8")
    model = MODELS["qwen3_moe"]
    modules = [Quantized(n, SHAPE, target.schemes_for(n)[0]) for n in model.quantized]
    kinds = {
        m.name.rpartition(".")[2] if ".experts." not in m.name else "expert": m for m in modules
    }
    assert kinds["expert"].scheme.bits == 4
    assert kinds["q_proj"].scheme.block_rows == 128
    assert target.quantization_config(modules, model.unquantized) == {"quant_method": "w4afp8"}
    experts = {name for name in model.quantized if ".experts." in name}
    assert set(target.statically_scaled(modules)) == experts
    with pytest.raises(UnsupportedError, match=r"in_proj_a stays unquantized"):
        target.quantization_config(
            modules, [*model.unquantized, "model.layers.3.linear_attn.in_proj_a"]
        )
    with pytest.raises(UnsupportedError, match="no expert"):
        target.quantization_config([m for m in modules if m.scheme.kind == "fp8"], [])


CT = [
    name for name in FORMATS if name not in ("awq", "awq 32", "gptq", "gptq 8 channel", "fp8 block")
]


@pytest.mark.parametrize("name", CT)
def test_transformers_parses_compressed_tensors(name: str) -> None:
    from transformers.utils.quantization_config import CompressedTensorsConfig

    config, _ = configured(*FORMATS[name], MODELS["qwen3_5"])
    parsed = CompressedTensorsConfig.from_dict(deepcopy(config))
    assert parsed.is_quantization_compressed
    assert parsed.quantization_config.format == config["format"]
    known = {
        "quant_method",
        "format",
        "quantization_status",
        "global_compression_ratio",
        "kv_cache_scheme",
        "config_groups",
        "ignore",
    }
    assert set(config) == known


@pytest.mark.parametrize("name", ["awq", "awq 32", "gptq", "gptq 8 channel", "fp8 block"])
def test_transformers_parses_the_others(name: str) -> None:
    from transformers.quantizers.auto import AutoQuantizationConfig

    config, _ = configured(*FORMATS[name], MODELS["qwen3_5"])
    parsed = AutoQuantizationConfig.from_dict(deepcopy(config))
    if name.startswith("awq"):
        assert (parsed.bits, parsed.zero_point, parsed.format) == (4, True, "gemm")
        assert parsed.group_size == config["group_size"]
    elif name.startswith("gptq"):
        assert (parsed.sym, parsed.desc_act, parsed.format) == (True, False, "gptq")
        assert (parsed.bits, parsed.group_size) == (config["bits"], config["group_size"])
    else:
        assert list(parsed.weight_block_size) == [128, 128]
    if not name.startswith("gptq"):
        assert parsed.modules_to_not_convert == config["modules_to_not_convert"]
