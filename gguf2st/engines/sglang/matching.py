"""What SGLang 0.5.23 makes of a quantization_config, layer by layer.

Each function names the one that it follows; paths are below
sglang/srt/layers/quantization unless given whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf2st.engines.names import Mapper, Packed
from gguf2st.engines.patterns import (
    REGEX,
    all_or_none,
    equal_or_regex,
    first_match,
    fused_match,
    shard_names,
)


class NoTargetError(Exception):
    """No target matches a layer that isn't ignored; SGLang refuses to start."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no target matches {name}, which isn't ignored")


# utils.py _FALLBACK_FUSED_SHARDS: fp8 knows these even where the class has no mapping.
FALLBACK: Packed = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def rename(name: str, mapper: Mapper) -> str:
    """models/utils.py WeightsMapper._map_name: of each kind the longest rule that fits, once."""
    for old, new in sorted(mapper.substr.items(), key=lambda rule: -len(rule[0])):
        if old in name:
            name = name.replace(old, new, 1)
            break
    for old, new in sorted(mapper.prefix.items(), key=lambda rule: -len(rule[0])):
        if name.startswith(old):
            name = name.replace(old, new, 1)
            break
    return name


def _listed(name: str, entries: Sequence[str]) -> bool:
    """compressed_tensors/utils.py check_equal_or_regex_match: also the end of a dotted path."""
    return any(
        equal_or_regex(name, entry)
        if entry.startswith(REGEX)
        else entry == name or name.endswith("." + entry)
        for entry in entries
    )


def ignored(name: str, ignore: Sequence[str], packed: Packed) -> bool:
    """compressed_tensors/utils.py should_ignore_layer: the shards, unless the fused name is listed.

    A regex that matches only the fused name doesn't count where `packed` knows its shards.
    """
    shards = shard_names(name, packed)
    if shards is None or name in ignore:
        return _listed(name, ignore)
    return all_or_none(name, shards, (_listed(s, ignore) for s in shards))


def matched_target(name: str, layer_class: str, targets: Sequence[str], packed: Packed) -> str:
    """compressed_tensors/utils.py find_matched_target: name, then class, then shards."""
    target = (
        first_match(name, targets)
        or first_match(layer_class, targets, contains=True)
        or fused_match(name, targets, packed)
    )
    if target is None:
        raise NoTargetError(name)
    return target


def head_target(name: str, targets: Sequence[str]) -> str | None:
    """CompressedTensorsConfig.get_lm_head_scheme: only a target that names the head."""
    return next((target for target in targets if _listed(name, [target])), None)


def awq_skipped(prefix: str, entries: Sequence[str]) -> bool:
    """awq/awq.py is_layer_skipped_awq: substrings of the fused name, shards are never tried."""
    return any(entry in prefix for entry in entries)


def fp8_entries(entries: Sequence[str]) -> list[str]:
    """fp8.py Fp8Config.from_config: each entry with and without "model." in front."""
    both = []
    for entry in entries:
        base = entry.removeprefix("model.")
        both += [base, f"model.{base}"]
    return both


def _on_path(entry: str, name: str) -> bool:
    """utils.py _module_path_match: whole components, anywhere on the path."""
    return f".{entry.rstrip('.')}." in f".{name.rstrip('.')}."


def fp8_skipped(prefix: str, entries: Sequence[str], packed: Packed) -> bool:
    """utils.py is_layer_skipped."""
    last = prefix.rpartition(".")[2]
    shards = shard_names(prefix, packed if last in packed else FALLBACK)
    if shards is not None:
        return all_or_none(
            prefix, shards, (any(_on_path(entry, s) for entry in entries) for s in shards)
        )
    if any(_on_path(entry, prefix) for entry in entries):
        return True
    if "gate_up_proj" in prefix:
        return all(prefix.replace("gate_up_proj", p) in entries for p in ("gate_proj", "up_proj"))
    if "experts" in prefix:
        return any(prefix in entry for entry in entries if "experts" in entry)
    return False
