"""An output tensor as a view of packed source rows: described first, read later, piece by piece.

Almost everything that llama.cpp's converter does to a weight moves whole rows.
A view therefore holds row numbers, not values: operations reshape, permute,
join and cut an array of row numbers with ordinary numpy calls, and only the
rows of the piece being written are ever read and decoded. What remains
(reordered columns, a transposition, arithmetic) is applied to the decoded piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gguf2st.buffers import Buffers
from gguf2st.gguf.blocks import BlockType, PackedRows, decode_rounded, decode_rows
from gguf2st.gguf.container import TensorInfo
from gguf2st.rounding import DTYPES, Halves

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]
Function = Callable[[Values], Values]

# A row number carries its source in the upper bits; 2**40 rows are more than any file holds.
SOURCE_SHIFT = 40
ROW_MASK = (1 << SOURCE_SHIFT) - 1
# Elements of the rows read at once while a transposed piece is gathered (4 MB of float32).
STRIP_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Source:
    """A GGUF tensor, with the scales that some types keep in a tensor of their own.

    `scale` multiplies the decoded values: one factor for the tensor, or one for
    each index of its first axis (NVFP4 experts).
    """

    tensor: TensorInfo
    scale: TensorInfo | None = None

    def decode(
        self, raw: npt.NDArray[np.uint8], rows: Indices, buffers: Buffers | None = None
    ) -> Values:
        """Values of packed `raw` rows (rows, row_bytes), whose row numbers are `rows`."""
        tensor = self.tensor
        columns = raw.shape[1] // tensor.kind.block_bytes * tensor.kind.block_size
        out = buffers.take("values", (len(raw), columns), np.float32) if buffers else None
        values = decode_rows(tensor.kind, raw, columns, big_endian=tensor.file.big_endian, out=out)
        if self.scale is not None:
            values = values * self.factors(rows)[:, None]
        return values

    def factors(self, rows: Indices) -> Values:
        """What the values of blocks are multiplied with, float32 (rows,), in rows of these numbers."""
        if self.scale is None:
            return np.ones(len(rows), np.float32)
        factors = read_whole(self.scale).ravel()
        return factors[rows // -(-self.tensor.row_count // factors.size)]


def read_whole(tensor: TensorInfo) -> Values:
    """All values of a small tensor, in its own shape."""
    raw = tensor.read_rows(0, tensor.row_count)
    values = decode_rows(tensor.kind, raw, tensor.columns, big_endian=tensor.file.big_endian)
    return values.reshape(tensor.shape)


@dataclass(frozen=True)
class View:
    """Rows of some sources, in an order and a shape, not read yet.

    `rows` has the shape of the leading axes and holds row numbers; `width` is the
    last axis; `columns` reorders it; `functions` are applied to float32 values in
    order; `transposed` swaps the last two axes at the very end. With `single`, rows
    hold one element each (width 1) and the last axis of `rows` is the tensor's own.
    """

    sources: tuple[Source, ...]
    rows: Indices
    width: int
    columns: Indices | None = None
    functions: tuple[Function, ...] = ()
    transposed: bool = False
    single: bool = False

    @classmethod
    def of(cls, sources: tuple[Source, ...], number: int) -> View:
        """The source of that number as it lies in its file."""
        tensor = sources[number].tensor
        rows = np.arange(tensor.row_count, dtype=np.int64) + (number << SOURCE_SHIFT)
        return cls(sources, rows.reshape(tensor.shape[:-1]), tensor.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in torch order."""
        if self.single:
            return self.rows.shape
        shape = (*self.rows.shape, self.width)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def with_rows(self, rows: Indices) -> View:
        """The same columns and arithmetic over other rows."""
        if self.transposed:
            raise ValueError("a transposed tensor can't be rearranged; transpose last")
        return replace(self, rows=rows)

    def take(self, axis: int, index: Indices) -> View:
        """Entries `index` of `axis`, which may be the last."""
        dimensions = self.rows.ndim + 1
        if not -dimensions <= axis < dimensions:
            raise ValueError(f"shape {self.shape} has no axis {axis}")
        if axis % dimensions < dimensions - 1:
            return self.with_rows(np.take(self.rows, index, axis % dimensions))
        if self.transposed:
            raise ValueError("a transposed tensor can't be rearranged; transpose last")
        columns = index if self.columns is None else self.columns[index]
        return replace(self, columns=columns, width=len(index))

    def apply(self, function: Function) -> View:
        """The same view with `function` applied to its values."""
        return replace(self, functions=(*self.functions, function))

    def acts_on_packed_rows(self) -> bool:
        """Whether the packed blocks can be moved as they are, without decoding.

        All rows must be of one type. Columns may move when every block moves as a whole.
        """
        return self.packed_type() is not None and not any(s.scale for s in self._used())

    def _used(self) -> list[Source]:
        return [self.sources[number] for number in np.unique(self.rows >> SOURCE_SHIFT)]

    def factors(self) -> frozenset[float]:
        """All factors that values of blocks are multiplied with: 1 alone for most types."""
        numbers = np.unique(self.rows)
        return frozenset(
            float(factor)
            for number, source in enumerate(self.sources)
            for factor in source.factors(numbers[numbers >> SOURCE_SHIFT == number] & ROW_MASK)
        )

    def packed_type(self) -> BlockType | None:
        """The type of all blocks where they can be moved as they are, or None.

        Their values may have `factors` yet.
        """
        kinds = {source.tensor.kind for source in self._used()}
        if self.functions or self.transposed or len(kinds) > 1:
            return None
        kind = kinds.pop()
        if self.columns is None:
            return kind
        if self.width % kind.block_size:
            return None
        blocks = self.columns.reshape(-1, kind.block_size)
        whole = (blocks[:, :1] % kind.block_size == 0).all() and (
            np.diff(blocks, axis=1) == 1
        ).all()
        return kind if whole else None

    def read_packed(
        self, start: int, stop: int, buffers: Buffers | None = None
    ) -> npt.NDArray[np.uint8]:
        """Blocks of output rows `start` to `stop`, uint8 of shape (rows, row_bytes).

        Only of a view that has a `packed_type`. They may lie in the thread's `buffers`.
        """
        numbers = self.rows.reshape(-1)[start:stop]
        pieces = []
        for source_number in np.unique(numbers >> SOURCE_SHIFT):
            chosen = np.flatnonzero(numbers >> SOURCE_SHIFT == source_number)
            tensor = self.sources[source_number].tensor
            own = buffers if len(chosen) == len(numbers) else None
            pieces.append((chosen, _read_packed(tensor, numbers[chosen] & ROW_MASK, own)))
        raw = pieces[0][1]
        if len(pieces) > 1:
            raw = np.empty((len(numbers), raw.shape[1]), np.uint8)
            for chosen, rows in pieces:
                raw[chosen] = rows
        if self.columns is None:
            return raw
        kind = tensor.kind
        order = self.columns[:: kind.block_size] // kind.block_size
        blocks = raw.reshape(len(raw), -1, kind.block_bytes)[:, order]
        return blocks.reshape(len(raw), -1)

    def packed_rows(self, start: int, stop: int, buffers: Buffers) -> PackedRows:
        """The same blocks with what they are."""
        tensor = self.sources[int(self.rows.flat[start]) >> SOURCE_SHIFT].tensor
        raw = self.read_packed(start, stop, buffers)
        return PackedRows(tensor.kind, raw, self.width, tensor.file.big_endian)

    def read_rounded(
        self, start: int, stop: int, dtype: str, buffers: Buffers
    ) -> tuple[Halves, int]:
        """Values of output rows `start` to `stop`, rounded to "BF16" (as uint16) or "F16".

        Only of a view that has a `packed_type`. They lie in the thread's `buffers`. The
        number says how many aren't finite.
        """
        rows = self.packed_rows(start, stop, buffers)
        out: Halves = buffers.take("rounded", rows.shape, DTYPES[dtype])
        return out, decode_rounded(
            rows.kind, rows.raw, rows.columns, dtype, out, big_endian=rows.big_endian
        )

    def read(self, start: int, stop: int, buffers: Buffers | None = None) -> Values:
        """Values of output rows `start` to `stop`, float32 of shape (rows, shape[-1]).

        Output rows count all leading axes together. Memory is bounded by the
        piece asked for, not by the tensor. They may lie in the thread's `buffers`.
        """
        if self.single:
            width = self.rows.shape[-1]
            values = self._gather(start * width, stop * width).reshape(stop - start, width)
        elif self.transposed:
            values = self._read_transposed(start, stop)
        else:
            values = self._gather(start, stop, buffers)
        for function in self.functions:
            values = function(values)
        return values

    def _gather(self, start: int, stop: int, buffers: Buffers | None = None) -> Values:
        numbers = self.rows.reshape(-1)[start:stop]
        values = self._decode(numbers, buffers=buffers)
        return values if self.columns is None else values[:, self.columns]

    def _decode(
        self, numbers: Indices, blocks: slice = slice(None), buffers: Buffers | None = None
    ) -> Values:
        """Values of the rows with these numbers; `blocks` limits which blocks of each row."""
        result: Values | None = None
        for source_number in np.unique(numbers >> SOURCE_SHIFT):
            chosen = numbers >> SOURCE_SHIFT == source_number
            source = self.sources[source_number]
            rows = numbers[chosen] & ROW_MASK
            own = buffers if len(rows) == len(numbers) else None
            raw = _read_packed(source.tensor, rows, own)
            values: Values
            if blocks != slice(None):
                raw = raw.reshape(len(rows), -1, source.tensor.kind.block_bytes)[:, blocks]
                raw = np.ascontiguousarray(raw).reshape(len(rows), -1)
            values = source.decode(raw, rows, own)
            if len(rows) == len(numbers):
                return values
            if result is None:
                result = np.empty((len(numbers), values.shape[1]), np.float32)
            result[chosen] = values
        assert result is not None
        return result

    def _read_transposed(self, start: int, stop: int) -> Values:
        matrices = self.rows.reshape(-1, self.rows.shape[-1])
        height = matrices.shape[1]
        result = np.empty((stop - start, height), np.float32)
        for matrix in range(start // self.width, -(-stop // self.width)):
            begin = max(start, matrix * self.width)
            end = min(stop, (matrix + 1) * self.width)
            first, last = begin - matrix * self.width, end - matrix * self.width
            target = result[begin - start : end - start]
            step = max(1, STRIP_ELEMENTS // self.sources[0].tensor.columns)
            for row in range(0, height, step):
                numbers = matrices[matrix, row : row + step]
                target[:, row : row + step] = self._columns_of(numbers, first, last).T
        return result

    def _columns_of(self, numbers: Indices, first: int, last: int) -> Values:
        if self.columns is not None:
            return self._decode(numbers)[:, self.columns[first:last]]
        sizes = {source.tensor.kind.block_size for source in self.sources}
        if len(sizes) > 1:
            return self._decode(numbers)[:, first:last]
        size = sizes.pop()
        begin = first // size
        values = self._decode(numbers, slice(begin, -(-last // size)))
        return values[:, first - begin * size : last - begin * size]


def _read_packed(
    tensor: TensorInfo, rows: Indices, buffers: Buffers | None = None
) -> npt.NDArray[np.uint8]:
    """Packed rows in the order asked for, read in as few and as long pieces as sensible."""
    low, high = int(rows.min()), int(rows.max()) + 1
    if high - low <= 2 * len(rows):
        raw = tensor.read_rows(low, high, buffers)
        return raw if high - low == len(rows) and _ascending(rows) else raw[rows - low]
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    raw = np.empty((len(rows), tensor.row_bytes), np.uint8)
    edges = np.flatnonzero(np.diff(ordered) > 1) + 1
    for begin, end in zip([0, *edges], [*edges, len(rows)], strict=True):
        piece = tensor.read_rows(int(ordered[begin]), int(ordered[end - 1]) + 1)
        raw[order[begin:end]] = piece[ordered[begin:end] - ordered[begin]]
    return raw


def _ascending(rows: Indices) -> bool:
    return bool((np.diff(rows) == 1).all())


def arrange(count: int, shape: tuple[int, ...], axes: tuple[int, ...], offset: int = 0) -> Indices:
    """Index that views `count` entries from `offset` as `shape` and permutes its axes.

    Entries before `offset` keep their place. Raises ValueError when `shape`
    doesn't hold exactly the entries after `offset`.
    """
    index = np.arange(count, dtype=np.int64)
    if math.prod(shape) != count - offset:
        raise ValueError(f"{count - offset} entries can't be arranged as {shape}")
    moved = index[offset:].reshape(shape).transpose(axes).reshape(-1)
    return np.concatenate([index[:offset], moved])
