"""What an output format is, and the registry of all.

A new format is one file with one class that calls `register`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gguf2st.errors import UsageError
from gguf2st.mapping import Recipe

# safetensors' names of dtypes -> bytes of one element
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "I64": 8,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as it will lie in a shard; `dtype` is safetensors' name, `shape` in torch order."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Target(Protocol):
    """An output format.

    A recipe becomes one tensor, or several for a quantized module; all are written
    row by row from the recipe's float32 values.
    """

    name: str
    torch_dtype: str

    def tensors(self, recipe: Recipe) -> Sequence[TensorSpec]:
        """The tensors that this format writes for a recipe."""
        ...

    def encode(self, spec: TensorSpec, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Rows of float32 values -> the same rows as they lie in the file, little-endian."""
        ...

    def quantization_config(self) -> dict[str, Any] | None:
        """`quantization_config` of config.json, or None for a dense format."""
        ...


_TARGETS: dict[str, Target] = {}


def register(target: Target) -> Target:
    """Make a format known under its name."""
    _TARGETS[target.name] = target
    return target


def target_named(name: str) -> Target:
    """The format of that name. Raises `UsageError` listing all."""
    if name not in _TARGETS:
        raise UsageError(f"there is no output format {name!r}; there are {', '.join(_TARGETS)}.")
    return _TARGETS[name]


def target_names() -> list[str]:
    """Names of all formats."""
    return list(_TARGETS)
