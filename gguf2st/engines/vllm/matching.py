"""What vLLM 0.32 makes of a quantization_config, layer by layer.

Each function names the one that it follows; paths are below
vllm/model_executor/layers/quantization unless given whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gguf2st.engines.names import Mapper, Packed
from gguf2st.engines.patterns import (
    REGEX,
    all_or_none,
    equal_or_regex,
    first_match,
    fused_match,
    shard_names,
)


def rename(name: str, mapper: Mapper) -> str:
    """models/utils.py WeightsMapper.map_name: every rule that fits, one after the other."""
    for old, new in mapper.substr.items():
        if old in name:
            name = name.replace(old, new, 1)
    for old, new in mapper.prefix.items():
        if name.startswith(old):
            name = name.replace(old, new, 1)
    return name


def rename_target(target: str, mapper: Mapper) -> str:
    """CompressedTensorsConfig.apply_vllm_mapper: only entries that look like a path are renamed."""
    return rename(target, mapper) if "." in target and not target.startswith(REGEX) else target


def ignored(name: str, ignore: Sequence[str], packed: Packed) -> bool:
    """compressed_tensors/utils.py should_ignore_layer, utils/config_utils.py find_matching_patterns.

    The fused name itself comes first; otherwise all shards or none.
    """
    if any(equal_or_regex(name, entry) for entry in ignore):
        return True
    shards = shard_names(name, packed)
    if shards is None:
        return False
    return all_or_none(
        name, shards, (any(equal_or_regex(s, entry) for entry in ignore) for s in shards)
    )


def matched_target(
    name: str, layer_class: str, targets: Sequence[str], packed: Packed
) -> str | None:
    """compressed_tensors/utils.py find_matched_target: name, then shards, then class."""
    return (
        first_match(name, targets)
        or fused_match(name, targets, packed)
        or first_match(layer_class, targets, contains=True)
    )


def skipped(
    prefix: str, entries: Sequence[str], packed: Packed, mode: Literal["exact", "substring"]
) -> bool:
    """utils/quant_utils.py is_layer_skipped: "substring" for AWQ, "exact" for fp8."""

    def matches(name: str) -> bool:
        return name in entries if mode == "exact" else any(entry in name for entry in entries)

    shards = shard_names(prefix, packed)
    if shards is not None:
        return matches(prefix) or all_or_none(prefix, shards, map(matches, shards))
    if "experts" in prefix and mode == "exact":
        # An entry of any single expert is enough.
        return any(prefix in entry for entry in entries if "experts" in entry)
    return matches(prefix)


def gptq_quantized(prefix: str, layers: Sequence[str], packed: Packed) -> bool:
    """utils/gptq_utils.py is_layer_gptq_quantized: substrings, all shards or none."""
    if not layers:
        return True
    shards = shard_names(prefix, packed)
    if shards is None:
        return any(layer in prefix for layer in layers)
    return all_or_none(prefix, shards, (any(layer in s for layer in layers) for s in shards))


def awq_entries_from_headers(tensors: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """auto_awq.py AutoAWQConfig.maybe_update_config: what stands for an empty list of exceptions.

    It takes the parent of every unquantized tensor, so "...linear_attn.A_log" makes the
    whole block an exception.
    """
    parents = {name.rpartition(".")[0] for name in tensors}
    return sorted(parents - set(quantized))
