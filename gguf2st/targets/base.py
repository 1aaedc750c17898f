"""What an output format is, and the registry of all.

A new format is one file with one class and one `register` call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array
from gguf2st.errors import UsageError
from gguf2st.gguf.blocks import PackedRows
from gguf2st.quantize import ErrorSums
from gguf2st.scheme import Scheme as Scheme  # noqa: PLC0414  # formats take it from here
from gguf2st.targets.options import TargetOptions

# safetensors' names of dtypes -> bytes of one element
DTYPE_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
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


@dataclass(frozen=True)
class Piece:
    """Rows of one output tensor, ready to be written: little-endian, from row `start` on.

    They are a numpy array, or a torch tensor where the values were one.

    Rows of stacked matrices are counted through all of them.
    """

    tensor: str
    start: int
    rows: Array


@dataclass(frozen=True)
class EncodeContext:
    """What an encoder may need beside the values.

    `importance` is float32 of shape (columns,): the weight of each column's squared
    error, or None. `group_maximum` is the largest magnitude over the module and its
    fused partners, given when the scheme asks for it. `fit` is "search" or "rtn".
    `activation_scale` is what quantized activations are multiplied with, where the
    checkpoint holds it. `block_factor` is what values of the scheme's `same_blocks` are
    multiplied with where rows come as such blocks; None where they come as values.
    """

    importance: npt.NDArray[np.float32] | None = None
    group_maximum: float = 0.0
    fit: str = "search"
    activation_scale: float = 1.0
    block_factor: float | None = None


class ModuleEncoder(Protocol):
    """Encodes one matrix, fed with its rows from the first to the last.

    Each call but the last gets a number of rows that `row_multiple` divides.
    """

    row_multiple: int
    takes_packed: bool
    errors: ErrorSums

    def encode(self, start: int, values: Array | PackedRows) -> Iterator[Piece]:
        """Take rows (rows, columns) from row `start` on; yield what can be written already.

        They can still be packed if the encoder says that it `takes_packed`.
        """
        ...

    def encode_blocks(self, start: int, blocks: npt.NDArray[np.uint8]) -> Iterator[Piece]:
        """Take rows (rows, row_bytes) of blocks of the scheme's `same_blocks` instead of values."""
        ...

    def finish(self) -> Iterator[Piece]:
        """Yield what needed the whole matrix."""
        ...


@dataclass(frozen=True)
class Quantized:
    """A module that the plan quantizes, as its target sees it.

    `name` is the module's name without leaf ("model.layers.0.mlp.down_proj"),
    `shape` is (out, in). A module of stacked matrices has `experts` of that shape; 0 is
    a matrix alone.
    """

    name: str
    shape: tuple[int, int]
    scheme: Scheme
    experts: int = 0


class Target(Protocol):
    """An output format.

    `dtype` is safetensors' name of the dtype of unquantized tensors, `torch_dtype`
    the one of config.json. `uniform` formats have one scheme for the whole checkpoint,
    as their configuration has no place for a second; `by_type` ones choose it by the GGUF
    types of a module's blocks.
    """

    name: str
    dtype: str
    torch_dtype: str
    uniform: bool
    by_type: bool

    def schemes(self) -> Sequence[Scheme]:
        """All schemes that the format can use with these options; none for a dense format."""
        ...

    def schemes_for(self, module: str, types: Collection[str] = ()) -> Sequence[Scheme]:
        """Schemes for a module of that name, best first; the plan takes the first that fits.

        `types` are the GGUF types of its blocks, given to formats `by_type` where the
        module's values are those of the file, in groups of 128 as they lie there.
        """
        ...

    def rungs(self) -> Sequence[Sequence[Scheme]]:
        """Schemes for quality levels, the smallest rung first; none for formats without a choice.

        A rung holds one scheme, and others of its kind for what that one doesn't fit.
        """
        ...

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """Why the layout can't hold a matrix (out, in) of that shape with that scheme, or None."""
        ...

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """The tensors that stand for a quantized module."""
        ...

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """A new encoder for a quantized module."""
        ...

    def statically_scaled(self, modules: Sequence[Quantized]) -> Sequence[str]:
        """Names of those modules whose activations get a scale from the checkpoint."""
        ...

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any] | None:
        """`quantization_config` of config.json, derived from the modules; None for a dense format.

        `unquantized` holds the names of all matrices (modules) that stay as they are.
        Raises `UnsupportedError` where the format can't express which they are.
        """
        ...


Factory = Callable[[TargetOptions], Target]
_TARGETS: dict[str, Factory] = {}
_ALIASES: dict[str, str] = {}


def register(name: str, factory: Factory, *aliases: str) -> None:
    """Make a format known; `factory` raises `UsageError` for options that it doesn't have."""
    _TARGETS[name] = factory
    _ALIASES.update(dict.fromkeys(aliases, name))


def target_named(name: str, options: TargetOptions | None = None) -> Target:
    """The format of that name with the given options. Raises `UsageError` listing all."""
    factory = _TARGETS.get(_ALIASES.get(name, name))
    if factory is None:
        raise UsageError(f"there is no output format {name!r}; there are {', '.join(_TARGETS)}.")
    return factory(options or TargetOptions())


def target_names() -> list[str]:
    """Names of all formats."""
    return list(_TARGETS)
