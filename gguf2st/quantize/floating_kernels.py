"""The inner loops of `floating`: small floating-point codes under shared scales.

E4M3 goes along the rows of its blocks. For E2M1 sixteen rows go side by side, a lane each, with
their group laid out transposed, so sums run over the columns of each row in their order, whatever
chunk it came in.
"""

from __future__ import annotations

import numpy as np

from gguf2st.jit import kernel
from gguf2st.quantize.errors import MARGIN
from gguf2st.quantize.scale_formulas import fits, stored_scale
from gguf2st.vectors import (
    absolute,
    bits_of,
    bytes_of,
    choose,
    every,
    formula,
    from_bits,
    lane,
    larger,
    load,
    loop,
    multiply_add,
    repeat,
    smaller,
    store,
    transpose,
)

f32 = np.float32

LANES = 16
STRIP = 64  # columns that are summed up side by side, and stored at once
INFINITY = 0x7F800000  # the bits of a float32; those of NaN are beyond
FINISHED, NOT_FINITE, OVERFLOW = 0, 1, 2  # what kernels return

# Formats of codes: bits of the mantissa, the least normal number as the bits of a float32, the largest.
E4M3 = (3, 0x3C800000, f32(448))
E2M1 = (1, 0x3F800000, f32(6))
EIGHTH = 32  # 1/8 in E4M3


@formula
def rounded(sizes, format):
    """The numbers of a format that are nearest to those of a vector, none negative, and their codes.

    What is too large, or not a number, becomes the largest.
    """
    mantissa, least, largest = format
    # Beside a power of two so much larger, float32 has just the format's steps: below the least
    # normal number they stay what they are there.
    places = 23 - mantissa
    sizes = choose(sizes < largest, sizes, largest)
    power = bits_of(sizes) & INFINITY
    power = choose(power > least, power, least) + (places << 23)
    total = sizes + from_bits(power)
    first = (least >> places) + (places << mantissa)
    code = bits_of(total) - power + (power >> places) - first
    return total - from_bits(power), code


@formula
def encoded_e4m3(values, place, weight, scale, codes, sums):
    """Write the codes of a vector; add squared errors, squares, and weighted squared errors."""
    value = load(values, place, LANES) / scale
    size = absolute(value)
    near, code = rounded(size, E4M3)
    store(codes, place, bytes_of(code | (bits_of(value) >> 24 & 0x80)))
    error = (size - near) * (size - near)
    return sums[0] + error, sums[1] + size * size, sums[2] + error * weight


@kernel
def encode_e4m3(values, weights, block, dtype, partial, codes, scales, sums):
    """Give each block of values a scale and E4M3 codes; return FINISHED, or why not.

    Values are float32 (rows * columns,), and STRIP divides columns; weights of squared errors are
    float32 (columns,). `block` is rows and columns of a block; STRIP divides the columns, and blocks
    at the ends can be cut off. `partial` is float32 (3 * STRIP,). Filled are `codes`, uint8 (rows *
    columns,), `scales`, float32 (blocks down, blocks across), and `sums`, float64 (3,): squared
    errors, squares of values, weighted squared errors.
    """
    block_rows, block_columns = block
    columns = weights.size
    rows = values.size // columns
    squared_sum, norm_sum, weighted_sum = 0.0, 0.0, 0.0
    for first_row in range(0, rows, block_rows):
        last_row = min(first_row + block_rows, rows)
        for index in range(scales.shape[1]):
            start, stop = index * block_columns, min((index + 1) * block_columns, columns)
            most = repeat(0, LANES)
            for row in range(first_row, last_row):
                for place in range(row * columns + start, row * columns + stop, LANES):
                    most = larger(bits_of(load(values, place, LANES)) & 0x7FFFFFFF, most)
            largest = 0
            for number in range(LANES):
                largest = max(largest, lane(most, number))
            if largest >= INFINITY:
                return NOT_FINITE
            scale = from_bits(repeat(largest, LANES)) / E4M3[2]
            scale = stored_scale(scale, 1.0, dtype)
            if not every(fits(scale, 1.0, dtype)):
                return OVERFLOW
            if largest == 0:
                scale = repeat(1.0, LANES)
            # Every fourth vector goes into the same sums.
            for offset in range(0, STRIP, LANES):
                squared, norm, weighted = repeat(0.0, LANES), repeat(0.0, LANES), repeat(0.0, LANES)
                for row in range(first_row, last_row):
                    for column in range(start + offset, stop, STRIP):
                        squared, norm, weighted = encoded_e4m3(
                            values,
                            row * columns + column,
                            load(weights, column, LANES),
                            scale,
                            codes,
                            (squared, norm, weighted),
                        )
                store(partial, offset, squared)
                store(partial, STRIP + offset, norm)
                store(partial, 2 * STRIP + offset, weighted)
            scales[first_row // block_rows, index] = lane(scale, 0)
            unit = np.float64(lane(scale, 0))
            unit = unit * unit
            for place in range(STRIP):
                squared_sum += partial[place] * unit
                norm_sum += partial[STRIP + place] * unit
                weighted_sum += partial[2 * STRIP + place] * unit
    sums[0], sums[1], sums[2] = squared_sum, norm_sum, weighted_sum
    return FINISHED


@formula
def scale_of(codes, global_scale):
    """What codes of scales stand for: E4M3 by a global scale, or E8M0 where that is 0."""
    power = from_bits(choose(codes > 0, codes << 23, 1 << 22))
    return choose(global_scale == 0, power, from_bits(codes << 20) * 2.0**120 / global_scale)


@formula
def plain_code(largest, global_scale):
    """The code of plain rounding's scale for the largest magnitude of a group."""
    # compressed-tensors' `round_to_power_2`: up from 1.75 times a power of two.
    power = larger(((bits_of(largest) + (1 << 21)) >> 23) - 2, 0)
    _, code = rounded((largest / E2M1[2]) * global_scale, E4M3)
    return choose(global_scale == 0, power, choose(code > 0, code, EIGHTH))


@formula
def just_above(error):
    """The least float32 that isn't below MARGIN times an error."""
    limit = error * MARGIN
    # A product and a sum with one rounding have the sign of what rounding took away.
    lost = multiply_add(error, MARGIN, -limit)
    return choose(lost > 0, from_bits(bits_of(limit) + 1), limit)


@formula
def measured(sizes, weights, first, group, scale, unit):
    """Weighted squared errors of encoding magnitudes with a scale, a unit squared for each lane."""

    def measure(column, total):
        size = load(sizes, column * LANES, LANES)
        near, _ = rounded(size / scale, E2M1)
        error = (size - near * scale) * unit
        return multiply_add(error * load(weights, first + column), error, total)

    return loop(0, group, 1, measure, repeat(0.0, LANES))[0]


@formula
def encoded(tile, sizes, weights, first, group, code_tile, scale, unit):
    """Fill `code_tile`; sum up squared errors, squares of values, and weighted squared errors."""

    def encode(column, squared, norm, weighted):
        value, size = load(tile, column * LANES, LANES), load(sizes, column * LANES, LANES)
        near, code = rounded(size / scale, E2M1)
        store(code_tile, column * LANES, bytes_of(code + choose(value < 0, 8, 0)))
        error, size = (size - near * scale) * unit, size * unit
        return (
            multiply_add(error, error, squared),
            multiply_add(size, size, norm),
            multiply_add(error * load(weights, first + column), error, weighted),
        )

    zero = repeat(0.0, LANES)
    return loop(0, group, 1, encode, zero, zero, zero)


@formula
def with_sizes(tile, sizes, place, bits):
    """Write magnitudes of a vector; return the bits of the largest ones up to here."""
    size = absolute(load(tile, place, LANES))
    store(sizes, place, size)
    return larger(bits_of(size), bits)


@kernel
def fit_e2m1(values, weights, groups, global_scale, steps, tiles, codes, scales, sums):
    """Choose scales by their codes and encode; return FINISHED, or why not.

    Values are float32 (rows * columns,), with rows added up to a multiple of LANES, which divides
    the columns of a group; these divide STRIP. The weight of a column's squared error is the product
    of `weights`, float32 (columns,), at most 1, and its group's entry of `groups`, float64 (groups,).
    `global_scale`, float32, is 0 for E8M0. Plain rounding's code plus each of `steps` is tried, the
    first of which is 0. `tiles` are two of float32 and two of uint8, all of (STRIP * LANES,). Filled
    are `codes`, uint8 (rows * columns,), `scales`, uint8 (rows, groups), of the caller's rows only,
    and `sums`, float64 (4,), in the order of `ErrorSums`.
    """
    tile, sizes, code_tile, row_tile = tiles
    columns = weights.size
    rows, group = values.size // columns, columns // groups.size
    least, most = (0, 254) if global_scale == f32(0) else (1, 126)
    squared_sum, norm_sum, weighted_sum, rounding_sum = 0.0, 0.0, 0.0, 0.0
    for row in range(0, rows, LANES):
        for index in range(scales.shape[1]):
            first = index * group
            bits = repeat(0, LANES)
            for column in range(0, group, LANES):
                transpose(
                    values, row * columns + first + column, columns, tile, column * LANES, LANES
                )
                for place in range(column * LANES, (column + LANES) * LANES, LANES):
                    bits = with_sizes(tile, sizes, place, bits)
            if not every(bits < INFINITY):
                return NOT_FINITE
            plain = plain_code(from_bits(bits), global_scale)
            picked = plain
            unit = repeat(1.0, LANES) / scale_of(plain, global_scale)
            rounding_error, limit = repeat(0.0, LANES), repeat(0.0, LANES)
            for number in range(len(steps)):
                code = plain + steps[number]
                code = smaller(larger(code, least), most)
                scale = scale_of(code, global_scale)
                total = measured(sizes, weights, first, group, scale, unit)
                if number == 0:
                    rounding_error, limit = total, just_above(total)
                else:
                    picked = choose(total < limit, code, picked)
                    limit = choose(total < limit, total, limit)
            scale = scale_of(picked, global_scale)
            squared, norm, weighted = encoded(
                tile, sizes, weights, first, group, code_tile, scale, unit
            )
            # Whole cache lines at a time, where columns allow: rows may lie a power of two apart.
            offset = first % STRIP
            for column in range(0, group, LANES):
                transpose(code_tile, column * LANES, LANES, row_tile, offset + column, STRIP)
            if offset + group == STRIP or first + group == columns:
                start = row * columns + first - offset
                for number in range(LANES):
                    for column in range(0, offset + group, LANES):
                        some = load(row_tile, number * STRIP + column, LANES)
                        store(codes, start + number * columns + column, some)
            store(code_tile, 0, bytes_of(picked))
            store(tile, 0, unit)
            store(tile, LANES, squared)
            store(tile, 2 * LANES, norm)
            store(tile, 3 * LANES, weighted)
            store(tile, 4 * LANES, rounding_error)
            for number in range(min(LANES, len(scales) - row)):
                scales[row + number, index] = code_tile[number]
                factor = np.float64(tile[number])
                square = 1 / (factor * factor)
                squared_sum += tile[LANES + number] * square
                norm_sum += tile[2 * LANES + number] * square
                weighted_sum += tile[3 * LANES + number] * square * groups[index]
                rounding_sum += tile[4 * LANES + number] * square * groups[index]
    sums[0], sums[1], sums[2], sums[3] = squared_sum, norm_sum, weighted_sum, rounding_sum
    return FINISHED
