"""Reads a quantization_config: entries, groups and their schemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf2st.engines.base import Config
from gguf2st.scheme import Scheme


@dataclass(frozen=True)
class Group:
    """A config group of compressed-tensors; `format` is its own or the config's."""

    name: str
    scheme: Scheme
    format: str


# transformers' Mxfp4Config has nothing to choose.
STACKED_MXFP4 = Scheme("mxfp4", 4, 32, stacked=True)


def groups_by_target(config: Config) -> dict[str, Group]:
    """Targets in the order of the config -> their group; a target named twice means the last."""
    found: dict[str, Group] = {}
    for name, group in config.get("config_groups", {}).items():
        own = Group(name, group_scheme(group), group.get("format") or config.get("format") or "")
        found.update(dict.fromkeys(group["targets"], own))
    return found


def group_scheme(group: Mapping[str, Any]) -> Scheme:
    """The scheme that a config group describes."""
    weights = group["weights"]
    bits, strategy = int(weights["num_bits"]), weights.get("strategy")
    activations = group.get("input_activations")
    rows, columns = 1, 0
    if strategy == "block":
        rows, columns = weights["block_structure"]
    elif strategy in ("group", "tensor_group"):
        columns = int(weights["group_size"])
    kind = "int"
    if weights.get("type", "int") == "float":
        kind = "fp8" if bits == 8 else "nvfp4" if strategy == "tensor_group" else "mxfp4"
    return Scheme(
        kind,
        bits,
        columns,
        symmetric=bool(weights.get("symmetric", True)),
        block_rows=int(rows),
        activation_bits=int(activations["num_bits"]) if activations else 16,
    )


def integer_scheme(config: Config, override: Mapping[str, Any] | None = None) -> Scheme:
    """The scheme of an AWQ or GPTQ config, with GPTQ's overrides for a module."""
    values = {**config, **(override or {})}
    group_size = int(values.get("group_size", values.get("q_group_size", -1)))
    bits = int(values.get("bits", values.get("w_bit", 4)))
    symmetric = bool(values["sym"]) if "sym" in values else not values.get("zero_point", True)
    return Scheme("int", bits, max(group_size, 0), symmetric)


def fp8_scheme(config: Config) -> Scheme:
    """The scheme of transformers' native fp8: blocks, or one scale for a whole matrix."""
    rows, columns = config.get("weight_block_size") or (1, 0)
    return Scheme("fp8", 8, int(columns), block_rows=int(rows), activation_bits=8)


def same_scheme(written: Scheme, read: Scheme, quant_method: str) -> bool:
    """Whether what the engine reads is what was written.

    AWQ always has zero points, whatever values they hold.
    """
    if quant_method == "awq":
        return (written.bits, written.group_size) == (read.bits, read.group_size)
    return written == read
