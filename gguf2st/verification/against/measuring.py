"""Compares the values of a place on both sides, in chunks of rows, and judges the difference.

What a checkpoint holds lies on a grid: a level of its number type times a scale. Who rounds to the
nearest is at most half a step away from the GGUF's value, except beyond the ends of the grid
(which a searched scale leaves some values out of). That is checked for every value. The rest are
bounds on the root mean square of the difference, of a tensor and of each row, in units of a
grid's own noise, step / sqrt(12).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf2st.buffers import Buffers
from gguf2st.gguf import TensorInfo
from gguf2st.gguf.blocks import BlockType, decode_rows
from gguf2st.verification import kernels
from gguf2st.verification.against.places import Order, Place
from gguf2st.verification.decoding import ROW_MULTIPLE, Decoding, RowsOf, dense, reader
from gguf2st.verification.grids import Rows
from gguf2st.verification.numbers import opened
from gguf2st.verification.stored import Stored

CHUNK_WEIGHTS = 1 << 20
# Half a step, and what float32 arithmetic on the way may add.
_HALF = 0.505
_ARITHMETIC = 4e-7
_UNDERFLOW = 1e-6
_LIMITS = np.array((_HALF, _ARITHMETIC, _UNDERFLOW), np.float32)
_NOTHING = np.empty(0, np.float32)
# Noise of a whole tensor and of one row may be so many times that of rounding to the grid.
TENSOR_NOISE, ROW_NOISE = 2.0, 4.0
# Rounded a second time, or with another search, it may be more; unrelated values differ by 1.4.
_APART_NOISE, _APART_ROW = 2.5, 3.0
_UNRELATED_TENSOR, _UNRELATED_ROW = 0.6, 0.8

_buffers = Buffers()


class Agreement(StrEnum):
    """How a place of the checkpoint compares with the GGUF, the worst last."""

    SAME = "same"  # rounded from the GGUF's values
    SCALED = "scaled"  # the same once scales that moved between tensors are moved back
    APART = "rounded apart"  # as far apart as two roundings of the same values are
    DIFFERS = "differs"


@dataclass(frozen=True)
class Factors:
    """What the checkpoint's values of a place are multiplied with before they are compared.

    `columns` (width,) and `rows` (height,) belong to the GGUF's columns and rows. `uncertainty`
    (width,) is how far off, relatively, `columns` may be. Unless that is `exact`, single values
    can't be checked, and it counts as noise.
    """

    columns: Rows | None = None
    rows: Rows | None = None
    uncertainty: Rows | None = None
    exact: bool = True


NONE = Factors()


@dataclass
class Measure:
    """Sums over the columns of each row of a place, in the GGUF's order.

    `difference`, `reference` (the GGUF), `own` (the checkpoint) and `step` are of squares,
    `product` of the GGUF's value times the checkpoint's. `beyond` counts values that are farther
    away than half a step though their grid goes on there. `marks` are sums of each column, of the
    GGUF and of the checkpoint, (2, width): what doesn't change when rows change places.
    """

    difference: npt.NDArray[np.float64]
    reference: npt.NDArray[np.float64]
    own: npt.NDArray[np.float64]
    product: npt.NDArray[np.float64]
    step: npt.NDArray[np.float64]
    marks: npt.NDArray[np.float64]
    beyond: int = 0

    @property
    def error(self) -> float:
        """Root mean square of the difference, relative to that of the GGUF's values."""
        return _ratio(self.difference.sum(), self.reference.sum())

    @property
    def noise(self) -> float:
        """What rounding to the checkpoint's grid causes, relative as the error is."""
        return _ratio(self.step.sum() / 12, self.reference.sum())

    @property
    def bound(self) -> float:
        """The largest relative error that rounding once to the checkpoint's grid explains."""
        return TENSOR_NOISE * self.noise + _UNDERFLOW

    @property
    def worst_row(self) -> float:
        """The largest error of a row, relative to the row."""
        if not len(self.difference):
            return 0.0
        return float(np.sqrt(self.difference / self._row_reference()).max())

    def with_rows_scaled(self) -> Measure:
        """The same after multiplying each row with what brings it closest to the GGUF's."""
        own = np.maximum(self.own, 1e-60)
        best = self.product / own
        left = np.maximum(self.reference - best * self.product, 0)
        return replace(
            self, difference=left, own=self.own * best**2, step=self.step * best**2, beyond=0
        )

    def _row_reference(self) -> npt.NDArray[np.float64]:
        """Rows that are almost nothing are compared with a tenth of an ordinary one."""
        mean = self.reference.sum() / max(1, len(self.reference))
        return np.asarray(np.maximum(self.reference, 1e-2 * mean) + 1e-60)

    def agreement(self, kind: BlockType) -> Agreement:
        """The judgement, where the GGUF stores the tensor as `kind`."""
        if not np.isfinite(self.difference).all():
            return Agreement.DIFFERS
        total, scale = self.difference.sum(), self._row_reference()
        floor = _UNDERFLOW**2 * scale
        noise = self.step / 12
        if (
            not self.beyond
            and total <= TENSOR_NOISE**2 * noise.sum() + floor.sum()
            and (self.difference <= ROW_NOISE**2 * noise + floor).all()
        ):
            return Agreement.SAME
        other = noise_of(kind) ** 2
        allowed = _APART_NOISE**2 * noise + other * scale
        close = total <= min(allowed.sum(), _UNRELATED_TENSOR**2 * self.reference.sum())
        rows = np.minimum(_APART_ROW**2 * allowed, _UNRELATED_ROW**2 * scale)
        return Agreement.APART if close and (self.difference <= rows).all() else Agreement.DIFFERS


def noise_of(kind: BlockType) -> float:
    """About twice the relative error of what a block type stores, by its bits for each weight."""
    plain = {"F64": 0.0, "F32": 0.0, "BF16": 2.0**-9, "F16": 2.0**-12}
    bits = 8 * kind.block_bytes / kind.block_size
    return plain.get(kind.name, min(0.5, 3 * float(2.0**-bits)))


def _ratio(squares: float, reference: float) -> float:
    if squares == 0:
        return 0.0
    return float(np.sqrt(squares / reference)) if reference else float("inf")


@dataclass
class GgufRows:
    """Rows of `width` values of a GGUF's tensor, whatever its own are."""

    tensor: TensorInfo
    width: int
    scale: npt.NDArray[np.float32] | None = None
    _whole: Rows | None = field(default=None, repr=False)

    @property
    def height(self) -> int:
        """How many there are."""
        return self.tensor.elements // max(1, self.width)

    def take(self, numbers: Order) -> Rows:
        """Rows (numbers, width) as float32, which the same thread's next call overwrites."""
        columns = self.tensor.columns
        if columns == self.width:
            values = self._decoded(numbers)
        elif self.width % columns == 0:
            each = self.width // columns
            lines = (numbers[:, None] * each + np.arange(each)).reshape(-1)
            values = self._decoded(lines).reshape(len(numbers), self.width)
        else:  # a vector that is a column there, or the other way round
            if self._whole is None:
                whole = self._decoded(np.arange(self.tensor.row_count))
                self._whole = whole.reshape(-1, self.width).copy()
            values = self._whole[numbers]
        if self.scale is not None:
            per = self.height // len(self.scale)
            values *= self.scale[numbers // per][:, None]
        return values

    def _decoded(self, numbers: Order) -> Rows:
        """Rows of the tensor; what is read are all from the first to the last of them."""
        first, stop = int(numbers.min()), int(numbers.max()) + 1
        raw = self.tensor.read_rows(first, stop, _buffers)
        if stop - first != len(numbers) or (np.diff(numbers) != 1).any():
            raw = raw[numbers - first]
        out = _buffers.take("reference", (len(numbers), self.tensor.columns), np.float32)
        order = self.tensor.file.big_endian
        return decode_rows(self.tensor.kind, raw, self.tensor.columns, big_endian=order, out=out)


@dataclass(frozen=True)
class Checkpoint:
    """Where matrices are read from."""

    directory: Path
    decoding: Decoding

    def reader(self, matrix: Stored, place: Place) -> RowsOf:
        """What decodes rows (rows, columns) of a place's matrix, in the checkpoint's order."""
        if not place.transposed:
            return reader(self.directory, matrix, self.decoding, place.entry)
        (tensor,) = matrix.leaves.values()
        turned = opened(self.directory, tensor)[place.entry].T
        return lambda start, stop: dense(turned[start:stop], tensor.dtype)


def measure(
    checkpoint: Checkpoint, matrix: Stored, place: Place, gguf: GgufRows, factors: Factors = NONE
) -> Measure:
    """Compare a place with the GGUF. Raises `OSError`, and `ValueError` for what doesn't fit."""
    home, read = _home(place), checkpoint.reader(matrix, place)
    sums, marks, beyond = np.zeros((5, place.height)), np.zeros((2, place.width)), 0
    scales = _scales(factors, place)
    room = _buffers.take("room", (6, place.width + kernels.LANES), np.float32)
    rows, columns = place.shape
    step = max(1, CHUNK_WEIGHTS // max(1, columns) // ROW_MULTIPLE) * ROW_MULTIPLE
    for start in range(0, rows, step):
        homes = home[start : start + step]
        lines = np.flatnonzero(homes >= 0)
        if not len(lines):
            continue
        grid = read(start, min(start + step, rows))
        homes = homes[lines]
        grid = grid.part(None if len(lines) == len(grid.numbers) else lines, place.columns)
        reference = gguf.take(homes + place.first)
        beyond += kernels.add_rows(
            grid, int(place.change), *scales, reference, homes, _LIMITS, room, sums, marks
        )
    difference, squares, own, product, noise = sums
    return Measure(difference, squares, own, product, noise, marks, beyond)


def vectors(
    checkpoint: Checkpoint, matrix: Stored, place: Place, gguf: GgufRows
) -> tuple[Rows, Rows, Rows]:
    """Of a place of one row: the GGUF's values, the checkpoint's, and half the steps of these."""
    grid = checkpoint.reader(matrix, place)(0, 1).part(None, place.columns)
    values, steps = np.empty((2, place.width), np.float32)
    kernels.place_row(grid, int(place.change), values, steps, np.empty(place.width, np.bool_))
    return gguf.take(np.array([place.first]))[0].copy(), values, _HALF * steps


def _home(place: Place) -> Order:
    """For each row of the checkpoint its number in the GGUF's part, -1 for those of other places."""
    rows = np.arange(place.shape[0]) if place.rows is None else place.rows
    home = np.full(place.shape[0], -1)
    home[rows] = np.arange(len(rows))
    return home


def _scales(factors: Factors, place: Place) -> tuple[Rows, Rows, Rows, bool]:
    """Factors of columns, how far off they are, those of rows, and whether that is all exact."""
    if factors.columns is None and factors.rows is None:
        return _NOTHING, _NOTHING, _NOTHING, factors.exact
    columns, off, rows = (
        np.full(size, default, np.float32) if given is None else given.astype(np.float32)
        for given, size, default in (
            (factors.columns, place.width, 1),
            (factors.uncertainty, place.width, 0),
            (factors.rows, place.height, 1),
        )
    )
    return columns, off, rows, factors.exact
