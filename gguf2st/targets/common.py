"""What several formats share: their options, reasons to refuse a shape, encoders."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array, empty_beside
from gguf2st.gguf.blocks import PackedRows
from gguf2st.quantize import ErrorSums, IntegerGrid, IntegerRows, quantize_rows
from gguf2st.targets.base import EncodeContext, Piece, Quantized, Scheme, TensorSpec
from gguf2st.targets.options import Settled


class QuantizedFormat:
    """A format that offers the same schemes for every module."""

    uniform = False
    by_type = False

    def __init__(
        self,
        name: str,
        options: Settled,
        schemes: Sequence[Scheme],
        rungs: Sequence[Sequence[Scheme]] = (),
    ) -> None:
        self.name, self.dtype, self.torch_dtype = name, options.dtype, options.torch_dtype
        self._schemes, self._rungs = tuple(schemes), tuple(rungs)

    def schemes(self) -> Sequence[Scheme]:
        """All schemes that the format can use with these options, best first."""
        return self._schemes

    def schemes_for(self, module: str, types: Collection[str] = ()) -> Sequence[Scheme]:
        """The same for every module."""
        return self._schemes

    def rungs(self) -> Sequence[Sequence[Scheme]]:
        """Those that the format was made with."""
        return self._rungs

    def statically_scaled(self, modules: Sequence[Quantized]) -> Sequence[str]:
        """None: activations stay as they are, or are measured while serving."""
        return ()


class RowScaledFormat(QuantizedFormat):
    """A format of codes of one byte, `code_dtype`, with a scale for each row."""

    code_dtype: str

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """Any matrix fits."""
        return None

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """Codes (out, in) and scales (out, 1)."""
        return [
            TensorSpec(f"{module.name}.weight", self.code_dtype, module.shape),
            TensorSpec(f"{module.name}.weight_scale", self.dtype, (module.shape[0], 1)),
        ]


class Encoder:
    """An encoder that needs no more than the rows at hand."""

    row_multiple = 1
    takes_packed = False

    def __init__(self, module: Quantized, context: EncodeContext) -> None:
        self.module, self.context = module, context
        self.errors = ErrorSums()
        self._whole: dict[str, Array] = {}

    def encode_blocks(self, start: int, blocks: npt.NDArray[np.uint8]) -> Iterator[Piece]:
        """No GGUF type has the codes of this format."""
        raise NotImplementedError(f"{type(self).__name__} takes values alone")

    def finish(self) -> Iterator[Piece]:
        """Yield the tensors that had to be whole."""
        for leaf, rows in self._whole.items():
            yield self._piece(leaf, 0, rows)

    def _held(self, leaf: str, shape: tuple[int, ...], dtype: str, values: Any) -> Array:
        """A whole tensor to be filled call by call and yielded in the end, where `values` lie."""
        if leaf not in self._whole:
            self._whole[leaf] = empty_beside(values, shape, dtype)
        return self._whole[leaf]

    def _piece(self, leaf: str, start: int, rows: Array) -> Piece:
        return Piece(f"{self.module.name}.{leaf}", start, rows)


class IntegerEncoder(Encoder):
    """An encoder to integers with scales. Plain rounding decodes blocks as it goes."""

    def __init__(self, module: Quantized, context: EncodeContext) -> None:
        super().__init__(module, context)
        self.takes_packed = context.fit == "rtn"

    def _integers(self, values: Array | PackedRows, scale_dtype: str) -> IntegerRows:
        """Codes, scales and zero points of rows by the module's scheme; their errors are added up."""
        scheme = self.module.scheme
        grid = IntegerGrid(scheme.bits, scheme.group_size, scheme.symmetric, scale_dtype)
        importance = self.context.importance
        # Plain least squares clips the large weights of a long group, which matter most.
        by_square = importance is None and not 0 < scheme.group_size <= 32
        rows = quantize_rows(values, grid, importance, self.context.fit, by_square=by_square)
        self.errors.add(rows.errors)
        return rows


def int4_rungs(options: Settled) -> list[list[Scheme]]:
    """The smallest int4 with smaller groups where that doesn't fit, and int4 in the smallest groups."""
    sizes = (128, 64, 32)
    coarse = [Scheme("int", 4, size, options.symmetric) for size in sizes]
    return [coarse, coarse[-1:]]


def ragged(what: str, size: int, unit: int, of: str) -> str | None:
    """Why `size` rows or columns don't fill units of that size, or None when they do."""
    if unit and size % unit:
        return f"{size} {what} can't be divided into {of} of {unit}"
    return None
