"""Compares the values of a place on both sides, in chunks of rows, and judges the difference.

What a checkpoint holds lies on a grid: a level of its number type times a scale. Who rounds to the
nearest is at most half a step away from the GGUF's value, except beyond the ends of the grid
(which a searched scale leaves some values out of). That is checked for every value. The rest are
bounds on the root mean square of the difference, of a tensor and of each row, in units of a
grid's own noise, step / sqrt(12).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf2st.gguf import TensorInfo
from gguf2st.gguf.blocks import BlockType, decode_rows
from gguf2st.verification.against.places import Order, Place
from gguf2st.verification.decoding import ROW_MULTIPLE, Decoding, Grid, Rows, reader
from gguf2st.verification.numbers import floats, opened
from gguf2st.verification.stored import Stored

CHUNK_WEIGHTS = 1 << 18
# Half a step, and what float32 arithmetic on the way may add.
_HALF = 0.505
_ARITHMETIC = 4e-7
_UNDERFLOW = 1e-6
# Noise of a whole tensor and of one row may be so many times that of rounding to the grid.
TENSOR_NOISE, ROW_NOISE = 2.0, 4.0
# Rounded a second time, or with another search, it may be more; unrelated values differ by 1.4.
_APART_NOISE, _APART_ROW = 2.5, 3.0
_UNRELATED_TENSOR, _UNRELATED_ROW = 0.6, 0.8
_MANTISSA = {"F64": 23, "F32": 23, "F16": 10, "BF16": 7, "F8_E4M3": 3, "F8_E5M2": 2}
_SMALLEST = {"F16": 2.0**-24, "F8_E4M3": 2.0**-9, "F8_E5M2": 2.0**-16}
_LARGEST = {"F16": 65504.0, "F8_E4M3": 448.0, "F8_E5M2": 57344.0, "e2m1": 6.0}


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
        """Rows (numbers, width) as float32."""
        columns = self.tensor.columns
        if columns == self.width:
            values = self._decoded(numbers)
        elif self.width % columns == 0:
            each = self.width // columns
            lines = (numbers[:, None] * each + np.arange(each)).reshape(-1)
            values = self._decoded(lines).reshape(len(numbers), self.width)
        else:  # a vector that is a column there, or the other way round
            if self._whole is None:
                self._whole = self._decoded(np.arange(self.tensor.row_count)).reshape(
                    -1, self.width
                )
            values = self._whole[numbers]
        if self.scale is not None:
            per = self.height // len(self.scale)
            values = values * self.scale[numbers // per][:, None]
        return values

    def _decoded(self, numbers: Order) -> Rows:
        raw = self.tensor.read_rows(0, self.tensor.row_count)[numbers]
        order = self.tensor.file.big_endian
        return decode_rows(self.tensor.kind, raw, self.tensor.columns, big_endian=order)


@dataclass(frozen=True)
class Checkpoint:
    """Where matrices are read from."""

    directory: Path
    decoding: Decoding

    def chunks(self, matrix: Stored, place: Place) -> Iterator[tuple[int, Grid]]:
        """The first row, in the checkpoint's order, and rows (rows, columns) of a place's matrix."""
        rows, columns = place.shape
        step = max(1, CHUNK_WEIGHTS // max(1, columns) // ROW_MULTIPLE) * ROW_MULTIPLE
        if place.transposed:
            (tensor,) = matrix.leaves.values()
            turned = opened(self.directory, tensor)[place.entry].T
            for start in range(0, rows, step):
                part = np.ascontiguousarray(turned[start : start + step])
                yield start, Grid(floats(part, tensor.dtype), np.float32(1), tensor.dtype)
            return
        read = reader(self.directory, matrix, self.decoding, place.entry)
        for start in range(0, rows, step):
            yield start, read(start, min(start + step, rows))


def measure(
    checkpoint: Checkpoint, matrix: Stored, place: Place, gguf: GgufRows, factors: Factors = NONE
) -> Measure:
    """Compare a place with the GGUF. Raises `OSError`, and `ValueError` for what doesn't fit."""
    home = _home(place)
    sums = [np.zeros(place.height) for _ in range(5)]
    found = Measure(sums[0], sums[1], sums[2], sums[3], sums[4], np.zeros((2, place.width)))
    for start, grid in checkpoint.chunks(matrix, place):
        numbers = home[start : start + len(grid.levels)]
        here = numbers >= 0
        if not here.any():
            continue
        values, step, inside = _placed(grid, place, here)
        numbers = numbers[here]
        reference = gguf.take(numbers + place.first)
        slack: Rows | np.float32 = np.float32(0)
        if factors.columns is not None:
            values, step = values * factors.columns, step * factors.columns
            if factors.uncertainty is not None:
                slack = np.abs(values) * factors.uncertainty
                if not factors.exact:
                    step = np.sqrt(step**2 + 12 * slack**2)
        if factors.rows is not None:
            down = factors.rows[numbers][:, None]
            values, step = values * down, step * down
        _add(found, numbers, reference, values, np.abs(step), slack, inside, factors.exact)
    return found


def _add(
    found: Measure,
    numbers: Order,
    reference: Rows,
    values: Rows,
    step: Rows,
    slack: Rows | np.float32,
    inside: npt.NDArray[np.bool_],
    exact: bool,
) -> None:
    difference = np.abs(values - reference)
    sums = (
        (found.difference, difference, difference),
        (found.reference, reference, reference),
        (found.own, values, values),
        (found.product, reference, values),
        (found.step, step, step),
    )
    for total, one, other in sums:
        total[numbers] = np.einsum("ij,ij->i", one, other)
    found.marks += reference.sum(0), values.sum(0)
    if not exact:
        return
    mean = np.sqrt(found.reference[numbers] / max(1, reference.shape[1])).astype(np.float32)[
        :, None
    ]
    allowed = _HALF * step + slack + _ARITHMETIC * (np.abs(values) + np.abs(reference))
    far = difference > allowed + _UNDERFLOW * mean
    found.beyond += int(np.count_nonzero(far & inside))


def vectors(
    checkpoint: Checkpoint, matrix: Stored, place: Place, gguf: GgufRows
) -> tuple[Rows, Rows, Rows]:
    """Of a place of one row: the GGUF's values, the checkpoint's, and half the steps of these."""
    ((_, grid),) = checkpoint.chunks(matrix, place)
    values, step, _ = _placed(grid, place, np.ones(1, bool))
    return gguf.take(np.array([place.first]))[0], values[0], _HALF * step[0]


def _home(place: Place) -> Order:
    """For each row of the checkpoint its number in the GGUF's part, -1 for those of other places."""
    rows = np.arange(place.shape[0]) if place.rows is None else place.rows
    home = np.full(place.shape[0], -1)
    home[rows] = np.arange(len(rows))
    return home


def _placed(
    grid: Grid, place: Place, here: npt.NDArray[np.bool_]
) -> tuple[Rows, Rows, npt.NDArray[np.bool_]]:
    """Values, steps and whether the grid goes on around them, of the rows and columns of a place."""
    values, step, inside = grid.values, _steps(grid), _inside(grid)
    if not here.all():
        values, step, inside = values[here], step[here], inside[here]
    if place.columns is not None:
        values, step = values[:, place.columns], step[:, place.columns]
        inside = inside[:, place.columns]
    if place.change == "+1":
        values = values + np.float32(1)
    elif place.change == "-exp":
        values = -np.exp(values)
        step = step * np.abs(values)
    return values, step, inside


def _steps(grid: Grid) -> Rows:
    """How far apart levels lie around each value."""
    levels = np.abs(grid.levels)
    if grid.kind == "int":
        return np.broadcast_to(np.abs(grid.factors), levels.shape).astype(np.float32)
    if grid.kind == "e2m1":
        apart = np.where(levels < 2, 0.5, np.where(levels < 4, 1, 2))
    else:
        apart = np.maximum(levels * 2.0 ** -_MANTISSA[grid.kind], _SMALLEST.get(grid.kind, 0))
    return np.asarray(apart * np.abs(grid.factors), np.float32)


def _inside(grid: Grid) -> npt.NDArray[np.bool_]:
    """Whether there are levels on both sides of a value's own."""
    if grid.kind == "int":
        codes = grid.levels + grid.zeros
        return np.asarray((codes > 0) & (codes < (1 << grid.bits) - 1))
    return np.asarray(np.abs(grid.levels) < _LARGEST.get(grid.kind, np.inf))
