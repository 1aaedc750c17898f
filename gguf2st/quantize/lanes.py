"""Sixteen rows side by side: how inner loops become vector code with the same result everywhere.

A tile holds up to 128 columns of sixteen rows, transposed: `tile[column, lane]`. Each step
of a loop over lanes does the same to sixteen neighbouring numbers, so it becomes vector
code; and each sum runs over its columns in their order, in its own lane. That is why
results depend neither on the machine nor on how rows were cut into chunks.

What is kept for each lane lies in one flat array, `state`, sixteen numbers after another,
since the compiler has to prove that what it reads and writes doesn't overlap before it
makes vector code. And it would unroll a short loop over sixteen rather than vectorize it,
so loops over lanes do much in each step.

The kernels here are compiled into those that call them, whose cached versions don't notice
changes of this file: after one, delete `__pycache__/*.nb?`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.jit import kernel

LANES = 16
TILE = 128

# A search must beat plain rounding by more than float32 sums over a tile can be wrong
# (2 * 128 * 2**-24), so that it is never worse, however errors are summed up.
MARGIN = 1 - 2**-15


def aligned(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin at a multiple of 64 bytes: vectors across cache lines take twice the time."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def scratch(state_size: int) -> tuple[npt.NDArray[Any], ...]:
    """What a kernel works in: a tile, its codes, `state`, float64 (3, LANES)."""
    return (
        aligned((TILE, LANES), np.float32),
        aligned((TILE, LANES), np.uint8),
        aligned((state_size,), np.float32),
        aligned((3, LANES), np.float64),
    )


@kernel
def load(
    values: npt.NDArray[np.float32],
    first_row: int,
    first_column: int,
    columns: int,
    tile: npt.NDArray[np.float32],
) -> None:
    """Transpose a piece of `values` into `tile`; lanes without a row become 0."""
    rows = min(LANES, values.shape[0] - first_row)
    for lane in range(rows):
        row = values[first_row + lane, first_column : first_column + columns]
        for column in range(columns):
            tile[column, lane] = row[column]
    for lane in range(rows, LANES):
        for column in range(columns):
            tile[column, lane] = np.float32(0)


@kernel
def store(
    code_tile: npt.NDArray[np.uint8],
    first_row: int,
    first_column: int,
    columns: int,
    codes: npt.NDArray[np.uint8],
) -> None:
    """Transpose `code_tile` into `codes`."""
    for lane in range(min(LANES, codes.shape[0] - first_row)):
        row = codes[first_row + lane, first_column : first_column + columns]
        for column in range(columns):
            row[column] = code_tile[column, lane]
