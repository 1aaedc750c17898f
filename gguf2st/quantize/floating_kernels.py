"""The inner loops of `floating`: small floating-point codes under shared scales."""

from __future__ import annotations

import numpy as np

from gguf2st.jit import kernel
from gguf2st.quantize.lanes import LANES, MARGIN, load, store
from gguf2st.vectors import multiply_add

f32, i32 = np.float32, np.int32

STRIP = 64  # columns that are summed up side by side
LARGEST_E4M3 = i32(0x43E00000)  # 448, as the bits of a float32
SMALLEST_NORMAL = i32(0x3C800000)  # 2**-6

# Where in `state` numbers of each lane begin.
SCALE, UNIT, ERROR = 0, 16, 32  # being tried; UNIT is 1 / the first scale tried
PICK_SCALE, SQUARED, NORM, WEIGHTED = 48, 64, 80, 96
STATE_SIZE = 112


@kernel
def magnitudes(words, block_rows, block_columns, out):
    """The largest magnitude of each block, as the bits of a float32; NaN is beyond infinity.

    `words` is float32 (rows, columns) seen as int32. Blocks at the end can be cut off.
    """
    rows, columns = words.shape
    out[:] = i32(0)
    for row in range(rows):
        for index in range(out.shape[1]):
            largest = i32(0)
            for column in range(index * block_columns, min((index + 1) * block_columns, columns)):
                magnitude = i32(words[row, column] & i32(0x7FFFFFFF))
                largest = magnitude if magnitude > largest else largest
            place = row // block_rows
            out[place, index] = max(out[place, index], largest)


@kernel
def encode_e4m3(values, weights, block_rows, block_columns, scales, table, codes, sums):
    """Round values / scale to E4M3, ties to even, at most 448; add to `sums`.

    `table` holds the value of each code. `sums` is float64 (3,): squared errors, squares of
    values, weighted squared errors.
    """
    rows, columns = values.shape
    quotients = np.empty(STRIP, np.float32)
    words = quotients.view(np.int32)
    partial = np.zeros(3 * STRIP, np.float32)
    for first_row in range(0, rows, block_rows):
        for index in range(scales.shape[1]):
            scale = scales[first_row // block_rows, index]
            partial[:] = f32(0)
            start, stop = index * block_columns, min((index + 1) * block_columns, columns)
            for row in range(first_row, min(first_row + block_rows, rows)):
                for column in range(start, stop, STRIP):
                    width = min(STRIP, stop - column)
                    piece, target = values[row, column:], codes[row, column:]
                    for i in range(width):
                        quotients[i] = piece[i] / scale
                    for i in range(width):
                        # Numba widens each result to 64 bits, and vectors hold half as many.
                        magnitude = i32(words[i] & i32(0x7FFFFFFF))
                        magnitude = magnitude if magnitude < LARGEST_E4M3 else LARGEST_E4M3
                        # Of a normal number, three bits of the mantissa stay. Below 2**-6,
                        # steps are 2**-9, and the number of steps is the code.
                        odd = i32(i32(magnitude >> i32(20)) & i32(1))
                        normal = i32(i32(magnitude + i32(0x7FFFF) + odd) >> i32(20))
                        size = abs(quotients[i])
                        size = size if size < f32(1) else f32(1)
                        small = i32(np.rint(size * f32(512)))
                        code = i32(normal - i32(960)) if magnitude >= SMALLEST_NORMAL else small
                        sign = i32(i32(words[i] >> i32(24)) & i32(0x80))
                        target[i] = np.uint8(i32(code | sign))
                    for i in range(width):
                        error = quotients[i] - table[target[i]]
                        square = error * error
                        partial[i] += square
                        partial[STRIP + i] += quotients[i] * quotients[i]
                        partial[2 * STRIP + i] += weights[column + i] * square
            unit = np.float64(scale) * np.float64(scale)
            for i in range(STRIP):
                sums[0] += partial[i] * unit
                sums[1] += partial[STRIP + i] * unit
                sums[2] += partial[2 * STRIP + i] * unit


@kernel
def measure_e2m1(tile, weights, columns, state):
    """Add the weighted squared errors that codes of SCALE make to ERROR, in the unit of UNIT."""
    for column in range(columns):
        weight = weights[column]
        for lane in range(LANES):
            value, scale = tile[column, lane], state[SCALE + lane]
            size = np.fmin(abs(value / scale), f32(6))
            # Steps are 1/2 below 2, 1 below 4, and 2 from there on.
            step = f32(0.5) if size < f32(2) else (f32(1) if size < f32(4) else f32(2))
            rounded = np.rint(size / step) * step
            error = (abs(value) - rounded * scale) * state[UNIT + lane]
            state[ERROR + lane] = multiply_add(weight * error, error, state[ERROR + lane])


@kernel
def encode_e2m1(tile, weights, code_tile, columns, state):
    """Fill in codes of PICK_SCALE: a sign and the number of one of 0, .5, 1, 1.5, 2, 3, 4, 6."""
    for column in range(columns):
        weight = weights[column]
        for lane in range(LANES):
            value, scale = tile[column, lane], state[PICK_SCALE + lane]
            size = np.fmin(abs(value / scale), f32(6))
            step = f32(0.5) if size < f32(2) else (f32(1) if size < f32(4) else f32(2))
            first = f32(0) if size < f32(2) else (f32(2) if size < f32(4) else f32(4))
            steps = np.rint(size / step)
            sign = f32(8) if value < f32(0) else f32(0)
            code_tile[column, lane] = np.uint8(np.int32(steps + first + sign))
            error = (abs(value) - steps * step * scale) * state[UNIT + lane]
            value = value * state[UNIT + lane]
            state[SQUARED + lane] = multiply_add(error, error, state[SQUARED + lane])
            state[NORM + lane] = multiply_add(value, value, state[NORM + lane])
            state[WEIGHTED + lane] = multiply_add(weight * error, error, state[WEIGHTED + lane])


@kernel
def fit_e2m1(values, weights, groups, table, steps, scratch, codes, scales, sums):
    """Choose scales by their codes and encode.

    Values are float32 (rows, columns). The weight of a column's squared error is the
    product of `weights`, float32 (columns,), at most 1, and its group's entry of `groups`,
    float64 (groups,). `table`, float32, holds what each scale code stands for. `scales`,
    uint8 (rows, groups), begins as plain rounding's codes; those with each of `steps` added
    are tried, the first of which is 0. Filled are `codes`, uint8 (rows, columns), and
    `sums`, float64 (4,), in the order of `ErrorSums`.
    """
    tile, code_tile, state, errors = scratch
    group = values.shape[1] // scales.shape[1]
    first = np.zeros(LANES, np.int64)
    picked = np.zeros(LANES, np.int64)
    for row in range(0, values.shape[0], LANES):
        count = min(LANES, values.shape[0] - row)
        for index in range(scales.shape[1]):
            piece = weights[index * group :]
            load(values, row, index * group, group, tile)
            for lane in range(LANES):
                first[lane] = scales[row + lane, index] if lane < count else 0
                state[UNIT + lane] = f32(1) / table[first[lane]]
            for number in range(len(steps)):
                for lane in range(LANES):
                    code = min(max(first[lane] + steps[number], 0), len(table) - 1)
                    state[SCALE + lane] = table[code]
                    state[ERROR + lane] = f32(0)
                measure_e2m1(tile, piece, group, state)
                for lane in range(LANES):
                    if number == 0 or state[ERROR + lane] < errors[1, lane]:
                        code = min(max(first[lane] + steps[number], 0), len(table) - 1)
                        picked[lane] = code
                        state[PICK_SCALE + lane] = state[SCALE + lane]
                        errors[1, lane] = state[ERROR + lane]
                    if number == 0:
                        errors[1, lane] *= MARGIN
                        errors[2, lane] = state[ERROR + lane]
            for place in range(SQUARED, STATE_SIZE):
                state[place] = f32(0)
            encode_e2m1(tile, piece, code_tile, group, state)
            store(code_tile, row, index * group, group, codes)
            for lane in range(count):
                scales[row + lane, index] = picked[lane]
                unit = 1 / np.float64(state[UNIT + lane]) ** 2
                sums[0] += state[SQUARED + lane] * unit
                sums[1] += state[NORM + lane] * unit
                sums[2] += state[WEIGHTED + lane] * unit * groups[index]
                sums[3] += errors[2, lane] * unit * groups[index]
