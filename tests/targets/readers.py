"""How engines decide from a configuration which modules are quantized, and how.

Each reader takes a parsed configuration and the name under which the engine builds a
module, and gives the scheme's bits and group size, or None for an unquantized module.
vLLM's and transformers' own functions do the work; SGLang can't be installed beside
them, so its rules are written down here from its source (0.5.23).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch

from tests.oracles.engines import need
from tests.targets.models import Model

Found = dict[str, tuple[int, int | None] | None]
EXPERT = re.compile(r"\.experts\.\d+\.")


class QKVParallelLinear(torch.nn.Module):
    """Stands for any of the engines' linear layers: only the class's name is looked at."""


def built(names: list[str], packed: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Modules of an engine: joined where its model class says so, with the names they consist of."""
    joined: dict[str, list[str]] = {}
    by_shard = {shard: fused for fused, shards in packed.items() for shard in shards}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        expert = EXPERT.search(name)
        if expert:
            joined.setdefault(f"{name[: expert.start()]}.experts", []).append(name)
        elif leaf in by_shard:
            joined.setdefault(f"{parent}.{by_shard[leaf]}", []).append(name)
        else:
            joined[name] = [name]
    return iter(joined.items())


def all_joined(packed: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is loaded joined whether or not the model class lists it for quantization."""
    return packed | {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }


def without_quantization(engine: str, name: str) -> bool:
    """Modules that an engine builds unquantized whatever the configuration says."""
    leaf = name.rpartition(".")[2]
    if leaf in ("embed_tokens", "gate", "shared_expert_gate", "pos_embed"):
        return True
    return engine == "sglang" and "visual." in name


def vllm(config: dict[str, Any], model: Model) -> Found:
    need("vllm")
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override
    from vllm.model_executor.models.utils import WeightsMapper

    parsed: Any = {
        "compressed-tensors": CompressedTensorsConfig,
        "awq": AutoAWQConfig,
        "gptq": AutoGPTQConfig,
        "fp8": Fp8Config,
    }[config["quant_method"]].from_config(deepcopy(config))
    mapper = WeightsMapper(orig_to_new_prefix=model.vllm_prefixes)
    parsed.packed_modules_mapping = model.vllm
    parsed.apply_vllm_mapper(mapper)
    if config["quant_method"] == "compressed-tensors":
        parsed._add_fused_moe_to_target_scheme_map()

    def scheme(name: str) -> tuple[int, int | None] | None:
        if config["quant_method"] == "compressed-tensors":
            if name.endswith(".experts"):
                each = [
                    parsed.get_scheme_dict(QKVParallelLinear(), f"{name}.0.{leaf}_proj")
                    for leaf in ("gate", "up", "down")
                ]
                assert each[0] == each[1] == each[2]
                found = each[0]
            else:
                found = parsed.get_scheme_dict(QKVParallelLinear(), name)
            return found and (found["weights"].num_bits, found["weights"].group_size)
        if config["quant_method"] == "gptq":
            skipped = get_dynamic_override(parsed, name) is False
        elif config["quant_method"] == "awq":
            packed = {} if name.endswith(".experts") else model.vllm
            skipped = quant_utils.is_layer_skipped(
                name, parsed.modules_to_not_convert, packed, match_mode="substring"
            )
        else:
            skipped = quant_utils.is_layer_skipped(name, parsed.ignored_layers, model.vllm)
        return None if skipped else plain(config)

    result: Found = {}
    for name, parts in built(model.names, all_joined(model.vllm)):
        here = mapper._map_name(f"{name}.") or ""
        if not without_quantization("vllm", name) and not name.endswith("lm_head"):
            result |= dict.fromkeys(parts, scheme(here.removesuffix(".")))
    return result


def transformers(config: dict[str, Any], model: Model) -> Found:
    from transformers.quantizers.quantizers_utils import should_convert_module

    result: Found = {}
    if config["quant_method"] == "compressed-tensors":
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.utils.match import is_match

        parsed = QuantizationConfig.model_validate(config)
        linear = torch.nn.Linear(1, 1)
    for name in model.names:
        # These aren't nn.Linear there; experts in particular are stacked parameters.
        leaf = name.rpartition(".")[2]
        if leaf in ("embed_tokens", "pos_embed", "gate") or EXPERT.search(name):
            continue
        if name.startswith("mtp."):  # not built
            continue
        if config["quant_method"] == "compressed-tensors":
            found = None
            for group in parsed.config_groups.values():
                # Names before classes: groups are tried with names first.
                exact = [t for t in group.targets if t != "Linear"]
                if is_match(name, linear, exact, parsed.ignore):
                    found = group
            for group in parsed.config_groups.values():
                if found is None and is_match(name, linear, group.targets, parsed.ignore):
                    found = group
            result[name] = found and (found.weights.num_bits, found.weights.group_size)
        elif config["quant_method"] == "gptq":
            skipped = any(re.match(e.removeprefix("-:"), name) for e in config["dynamic"])
            result[name] = None if skipped else plain(config)
        else:
            converted = should_convert_module(name, config["modules_to_not_convert"])
            result[name] = plain(config) if converted else None
    return result


def sglang(config: dict[str, Any], model: Model) -> Found:
    """compressed_tensors/utils.py, awq/awq.py, quantization/utils.py."""
    packed = model.sglang

    def listed(name: str, entries: list[str]) -> bool:
        return any(
            re.match(e[3:], name) if e.startswith("re:") else name == e or name.endswith(f".{e}")
            for e in entries
        )

    def shards(name: str, mapping: dict[str, list[str]]) -> list[str]:
        leaf = name.rpartition(".")[2]
        return [name.replace(leaf, shard) for shard in mapping.get(leaf, [leaf])]

    def agreed(verdicts: list[bool]) -> bool:
        assert len(set(verdicts)) == 1, "shards of one matrix differ"
        return verdicts[0]

    def compressed(name: str) -> tuple[int, int | None] | None:
        alone = name in config["ignore"]
        parts = [name] if alone else shards(name, packed)
        if agreed([listed(part, config["ignore"]) for part in parts]):
            return None
        targets = {t: g for g in config["config_groups"].values() for t in g["targets"]}
        hit = next((t for t in targets if first(name, t)), None)
        if hit is None and "Linear" in targets:
            hit = "Linear"  # a part of the class's name
        assert hit is not None, f"no target for {name}"
        weights = targets[hit]["weights"]
        return weights["num_bits"], weights["group_size"]

    def first(name: str, target: str) -> bool:
        return bool(re.match(target[3:], name)) if target.startswith("re:") else name == target

    def component(entry: str, name: str) -> bool:
        return f".{entry}." in f".{name}."

    def skipped(name: str) -> bool:
        if config["quant_method"] == "awq":
            return any(entry in name for entry in config["modules_to_not_convert"])
        if config["quant_method"] == "gptq":
            if name.endswith(".experts"):  # GPTQMarlinConfig.get_quant_method doesn't ask
                return False
            return any(re.match(entry.removeprefix("-:"), name) for entry in config["dynamic"])
        entries = [
            variant
            for entry in config["modules_to_not_convert"]
            for base in [entry.removeprefix("model.")]
            for variant in (base, f"model.{base}")
        ]
        leaf = name.rpartition(".")[2]
        mapping: Callable[[], dict[str, list[str]]] = lambda: (  # noqa: E731
            packed if leaf in packed else all_joined({})
        )
        parts = shards(name, mapping())
        hit = agreed([any(component(e, part) for e in entries) for part in parts])
        if ".experts" in name and not hit:
            hit = any(name in entry for entry in entries if "experts" in entry)
        return hit

    result: Found = {}
    for name, parts in built(model.names, all_joined(packed)):
        if without_quantization("sglang", name) or name.endswith("lm_head"):
            continue
        if name == "mtp.fc":  # a plain nn.Linear
            continue
        if config["quant_method"] == "compressed-tensors":
            probe = f"{name}.0.gate_proj" if name.endswith(".experts") else name
            found = compressed(probe)
        else:
            found = None if skipped(name) else plain(config)
        result |= dict.fromkeys(parts, found)
    return result


def plain(config: dict[str, Any]) -> tuple[int, int | None]:
    """Bits and group size of a configuration that has one for all."""
    return config.get("bits", 8), config.get("group_size")


READERS = {"vllm": vllm, "sglang": sglang, "hf": transformers}
