"""Values of a matrix as what they are stored as: numbers of a type, times scales."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gguf2st.buffers import Buffers

Rows = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Runs = tuple[Numbers, Numbers]
_MANTISSA = {"F64": 23, "F32": 23, "F16": 10, "BF16": 7, "F8_E4M3": 3, "F8_E5M2": 2}
_SMALLEST = {"F16": 2.0**-24, "F8_E4M3": 2.0**-9, "F8_E5M2": 2.0**-16}
_LARGEST = {"F16": 65504.0, "F8_E4M3": 448.0, "F8_E5M2": 57344.0}

_buffers = Buffers()


class Change(IntEnum):
    """What is done to values."""

    NONE = 0
    PLUS_ONE = 1
    NEGATIVE_POWER = 2  # -exp(value)


class Spacing(NamedTuple):
    """How far apart the numbers of a type lie, and between which ends.

    That is `relative` times their magnitude, of those with `binades` times the power of two below
    it, and at least `smallest`. All are float32.
    """

    relative: np.float32
    smallest: np.float32
    low: np.float32
    high: np.float32
    binades: bool = False


def floating(dtype: str) -> Spacing:
    """That of a floating-point dtype of safetensors."""
    end = _LARGEST.get(dtype, np.inf)
    relative, smallest = 2.0 ** -_MANTISSA[dtype], _SMALLEST.get(dtype, 0)
    return Spacing(np.float32(relative), np.float32(smallest), np.float32(-end), np.float32(end))


def integers(low: int, high: int) -> Spacing:
    """That of integers from `low` to `high`."""
    return Spacing(np.float32(0), np.float32(1), np.float32(low), np.float32(high))


E2M1_SPACING = Spacing(np.float32(0.5), np.float32(0.5), np.float32(-6), np.float32(6), True)


class Grid(NamedTuple):
    """Rows of a matrix: (numbers - zeros) * factors.

    `numbers` (rows, in) are in memory that the next grid of the same thread gets. `zeros` and `factors`
    (rows or 1, groups or 1) are those of each group of columns in each row. `runs` (bounds, members)
    say which columns these are: those from `bounds[i]` to `bounds[i + 1]` are of group `members[i]`.
    """

    numbers: Rows
    factors: Rows
    zeros: Rows
    runs: Runs
    spacing: Spacing

    def part(self, rows: Numbers | None, columns: Numbers | None) -> Grid:
        """Some of the rows and columns, in the order in which they are given; None means all."""
        found = self
        if rows is not None:
            factors, zeros = (a if len(a) == 1 else a[rows] for a in (self.factors, self.zeros))
            numbers = _taken("rows", self.numbers, rows, 0)
            found = Grid(numbers, factors, zeros, self.runs, self.spacing)
        if columns is not None:
            bounds, members = self.runs
            runs = runs_of(np.repeat(members, np.diff(bounds))[columns])
            found = found._replace(numbers=_taken("columns", found.numbers, columns, 1), runs=runs)
        return found

    @property
    def values(self) -> Rows:
        """What the rows stand for, (rows, in)."""
        from gguf2st.verification import kernels  # noqa: PLC0415  # importing numba takes a while

        found = np.empty(self.numbers.shape, np.float32)
        kernels.multiply(self, found)
        return found


def runs_of(groups: Numbers) -> Runs:
    """Runs of columns, from the group of each."""
    bounds = np.flatnonzero(np.diff(groups, prepend=-1, append=-1))
    return bounds, groups[bounds[:-1]]


def _taken(name: str, numbers: Rows, order: Numbers, axis: int) -> Rows:
    shape = (len(order), numbers.shape[1]) if axis == 0 else (len(numbers), len(order))
    out = _buffers.take(name, shape, np.float32)
    # Modes that check no indices write in place; the other one makes a copy first.
    return np.take(numbers, order, axis, out, mode="clip")
