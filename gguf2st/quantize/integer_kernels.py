"""The inner loops of `integer`: a scale, a zero point and codes for each group of each row.

Sixteen rows go side by side, a lane each, so sums run over the columns of each row in their
order, whatever chunk it came in. Their group is laid out transposed, in `tile`, and
multiplied with a power of two, which is exact, such that its largest magnitude lies from 1 to 2:
squares can then neither overflow nor vanish, whatever the unit of the weights.

Codes are signed here, from -half to half - 1, and a value is (code - offset) * scale;
k stands for code - offset.
"""

from __future__ import annotations

import numpy as np

from gguf2st.jit import kernel, part
from gguf2st.vectors import (
    absolute,
    bits_of,
    bytes_of,
    choose,
    downward,
    every,
    from_bits,
    integers,
    load,
    multiply_add,
    nearest,
    repeat,
    store,
    transpose,
)

LANES = 16
STRETCH = 128  # columns whose errors are summed up for themselves, which keeps sums exact
# A search must beat plain rounding by more than float32 sums can be wrong, so that it is never
# worse, however errors are summed up: the sums of a stretch, and those of 512 stretches.
MARGIN = np.float32(1 - 2**-13)

f32 = np.float32

# Dtypes of scales: bits of float32's mantissa that they lack, their smallest number, their largest.
F32 = (0, f32(2**-149), f32(3.4028235e38))
F16 = (13, f32(2**-24), f32(65504))
BF16 = (16, f32(2**-133), f32(3.3895314e38))
ROUNDER = f32(1.5 * 2**23)
FINISHED, NOT_FINITE, OVERFLOW = 0, 1, 2  # what `fit_rows` returns


@part
def smaller(a, b):
    """The smaller of each two numbers."""
    return choose(a < b, a, b)


@part
def larger(a, b):
    """The larger of each two numbers."""
    return choose(a > b, a, b)


@part
def clipped(values, low, high):
    """Values between two bounds."""
    return smaller(larger(values, low), high)


@part
def stored_scale(scale, unit, dtype):
    """A scale as its dtype holds it; `unit` is the one in which it and the result are counted.

    A scale that would become zero becomes the smallest number of the dtype.
    """
    missing, smallest, _ = dtype
    scale = scale / unit
    if missing:
        words = bits_of(scale)
        below_half = (1 << (missing - 1)) - 1
        words = (words + (words >> missing & 1) + below_half) & -(1 << missing)
        rounded = from_bits(words)
        if missing == 13:
            # Below the normal numbers of F16, its steps are 2**-24.
            steps = nearest(scale * f32(2**24)) * f32(2**-24)
            rounded = choose(absolute(scale) < f32(2**-14), steps, rounded)
        scale = rounded
    return choose(scale == 0, repeat(smallest, LANES), scale) * unit


@part
def measured(tile, weight_tile, group, scale, offset, half):
    """Weighted sums of value * k, of k * k and of squared errors of encoding with a scale."""
    highest = half - f32(1)
    xk, kk, total = repeat(0.0, LANES), repeat(0.0, LANES), repeat(0.0, LANES)
    for first in range(0, group, STRETCH):
        errors = repeat(0.0, LANES)
        for place in range(first * LANES, min(first + STRETCH, group) * LANES, LANES):
            value, weight = load(tile, place, LANES), load(weight_tile, place, LANES)
            code = value / scale + offset
            code = choose(code > -half, code, -half)
            code = choose(code < highest, code, highest)
            k = nearest(code) - offset
            error = value - k * scale
            weighted = weight * k
            xk = multiply_add(weighted, value, xk)
            kk = multiply_add(weighted, k, kk)
            errors = multiply_add(weight * error, error, errors)
        total = total + errors
    return xk, kk, total


@part
def searched(tile, weight_tile, group, low, high, base, factors, half, symmetric):
    """The scale and the first k of the window that explain most of the values.

    What a window of k explains with its best scale is sum(value * k)^2 / sum(k * k). A factor
    stands for a scale and two windows of k.
    """
    width = half + half - f32(1)
    best, best_scale, best_from = repeat(0.0, LANES), repeat(1.0, LANES), repeat(-half, LANES)
    for number in range(len(factors)):
        scale, first = proposed(low, high, base, factors[number], half, symmetric)
        inverse = repeat(1.0, LANES) / scale
        second, last = first + f32(1), first + width
        after_last = last + f32(1)
        xk, kk = repeat(0.0, LANES), repeat(0.0, LANES)
        xk_2, kk_2 = repeat(0.0, LANES), repeat(0.0, LANES)
        rounder = repeat(ROUNDER, LANES)
        for place in range(0, group * LANES, LANES):
            value, weight = load(tile, place, LANES), load(weight_tile, place, LANES)
            # Adding 1.5 * 2**23 rounds to an integer.
            code = multiply_add(value, inverse, rounder) - ROUNDER
            k = clipped(code, first, last)
            weighted = weight * k
            xk = multiply_add(weighted, value, xk)
            kk = multiply_add(weighted, k, kk)
            k = clipped(code, second, after_last)
            weighted = weight * k
            xk_2 = multiply_add(weighted, value, xk_2)
            kk_2 = multiply_add(weighted, k, kk_2)
        scale, scale_2 = xk / kk, xk_2 / kk_2
        score, score_2 = scale * xk, scale_2 * xk_2
        better = score > best
        best_scale, best_from = (
            choose(better, scale, best_scale),
            choose(better, first, best_from),
        )
        best = choose(better, score, best)
        better = score_2 > best
        best_scale, best_from = (
            choose(better, scale_2, best_scale),
            choose(better, second, best_from),
        )
        best = choose(better, score_2, best)
    return best_scale, best_from


@part
def proposed(low, high, base, factor, half, symmetric):
    """A scale to try, plain rounding's times a factor, and the first k of a window.

    Factor 0 stands for the scale that takes the largest magnitude to code -half.
    """
    width = half + half - f32(1)
    # What clipping takes away, it takes from both ends: windows stay in proportion.
    scale = base * factor
    steady = larger(scale, base)
    if factor == f32(0):
        scale = larger(low * f32(-1), high) / half
        steady = scale
    first = repeat(-half, LANES)
    if not symmetric:
        first = downward(low / steady)
        first = choose(first > -width, first, -width)
        first = choose(first < f32(-1), first, f32(-1))
    return scale, first


@part
def settled(scale, first, unit, pick_scale, pick_offset, half, symmetric, dtype):
    """A scale as its dtype holds it, and its offset; the pick where the dtype can't hold it."""
    if symmetric:
        # The window from -half + 1 to half is the symmetric one with a negative scale.
        scale = choose(first == -half, scale, scale * f32(-1))
        offset = repeat(0.0, LANES)
    else:
        offset = (first + half) * f32(-1)
    scale = stored_scale(scale, unit, dtype)
    fits = absolute(scale) <= unit * dtype[2]
    return choose(fits, scale, pick_scale), choose(fits, offset, pick_offset)


@part
def loaded(flat, start, columns, group, tile):
    """Fill the tile; return each lane's least and greatest value (0 among them), and 0 or NaN."""
    low, high, odd = repeat(0.0, LANES), repeat(0.0, LANES), repeat(0.0, LANES)
    for column in range(0, group, LANES):
        transpose(flat, start + column, columns, tile, column * LANES, LANES)
        for place in range(column * LANES, (column + LANES) * LANES, LANES):
            value = load(tile, place, LANES)
            low, high = smaller(value, low), larger(value, high)
            # An infinity or a NaN leaves a NaN.
            odd = odd + (value - value)
    return low, high, odd


@part
def rounded_plainly(low, high, half, symmetric, dtype):
    """Unit and 1 / unit of each group, plain rounding's scale before and after it is stored, its offset.

    They have the numbers of compressed-tensors (`calculate_qparams`): the scale is rounded to
    its dtype after the offset was found with the exact one. Scales are counted in the unit.
    """
    levels = half + half - f32(1)
    magnitude = larger(low * f32(-1), high)
    exponent = (bits_of(magnitude) >> 23) - 127
    exponent = choose(exponent > -126, exponent, -126)
    exponent = choose(exponent < 126, exponent, 126)
    unit, inverse_unit = from_bits((exponent * -1 + 127) << 23), from_bits((exponent + 127) << 23)
    zeros_only = magnitude == 0
    scale, offset = magnitude / (levels / f32(2)), repeat(0.0, LANES)
    if not symmetric:
        scale = (high - low) / levels
        offset = low / scale * f32(-1) - half
        offset = choose(offset > -half, offset, -half)
        offset = nearest(choose(offset < half - f32(1), offset, half - f32(1)))
        offset = choose(zeros_only, repeat(0.0, LANES), offset)
    # A group of zeros has scale 1.
    base = choose(zeros_only, unit, scale * unit)
    return unit, inverse_unit, base, stored_scale(base, unit, dtype), offset


@part
def fitted(source, tiles, first_column, group, low, high, unit, base, scale, offset, options):
    """The best of all attempts, and the weighted squared error of the first, plain rounding.

    The tile is multiplied with the unit, and `weight_tile` filled.
    """
    tile, weight_tile, _, _ = tiles
    _, weights, by_square = source
    half, symmetric, dtype, factors = options
    for column in range(group):
        value = load(tile, column * LANES, LANES) * unit
        store(tile, column * LANES, value)
        weight = repeat(weights[first_column + column], LANES)
        if by_square:
            weight = weight * value * value
        store(weight_tile, column * LANES, weight)
    low, high = low * unit, high * unit
    xk, kk, rounding_error = measured(tile, weight_tile, group, scale, offset, half)
    error = rounding_error * MARGIN
    # With many codes, sums can't tell candidates apart: each of them is measured.
    fine, signs = half > f32(8), 2 if symmetric else 1
    attempts = signs * len(factors) if fine else 1
    for step in range(attempts + 1):
        if step == attempts:
            # Least squares: the best scale for the codes of the best attempt.
            refined = choose(kk > 0, xk / kk, scale)
            first = (offset + half) * f32(-1)
            first = choose(refined < 0, first + f32(1), first)
            tried = absolute(refined)
        elif fine:
            tried, first = proposed(low, high, base, factors[step // signs], half, symmetric)
            if step % signs:
                first = first + f32(1)
        else:
            tried, first = searched(
                tile, weight_tile, group, low, high, base, factors, half, symmetric
            )
        tried, tried_offset = settled(tried, first, unit, scale, offset, half, symmetric, dtype)
        tried_xk, tried_kk, tried_error = measured(
            tile, weight_tile, group, tried, tried_offset, half
        )
        better = tried_error < error
        scale, offset = choose(better, tried, scale), choose(better, tried_offset, offset)
        xk, kk = choose(better, tried_xk, xk), choose(better, tried_kk, kk)
        error = choose(better, tried_error, error)
    return scale, offset, rounding_error


@part
def encoded(source, tiles, first_column, group, unit, scale, offset, half):
    """Fill `code_tile` with unsigned codes; sum up squared errors, squares, weighted errors.

    `unit` is what the tile still has to be multiplied with.
    """
    tile, _, code_tile, _ = tiles
    _, weights, by_square = source
    squared, norm, weighted = repeat(0.0, LANES), repeat(0.0, LANES), repeat(0.0, LANES)
    highest, inverse = half - f32(1), repeat(1.0, LANES) / scale
    for start in range(0, group, STRETCH):
        some, some_norm, some_weighted = (
            repeat(0.0, LANES),
            repeat(0.0, LANES),
            repeat(0.0, LANES),
        )
        for column in range(start, min(start + STRETCH, group)):
            value = load(tile, column * LANES, LANES) * unit
            weight = repeat(weights[first_column + column], LANES)
            if by_square:
                weight = weight * value * value
            # A product is quicker than the quotient, and off by so little that only near a tie
            # they can round to different codes.
            code = multiply_add(value, inverse, offset)
            if not every(absolute(code - nearest(code)) < f32(0.5 - 2**-12)):
                code = value / scale + offset
            code = choose(code > -half, code, -half)
            code = nearest(choose(code < highest, code, highest))
            store(code_tile, column * LANES, bytes_of(integers(code + half)))
            error = value - (code - offset) * scale
            some = multiply_add(error, error, some)
            some_norm = multiply_add(value, value, some_norm)
            some_weighted = multiply_add(weight * error, error, some_weighted)
        squared, norm, weighted = squared + some, norm + some_norm, weighted + some_weighted
    return squared, norm, weighted


@kernel
def fit_rows(source, groups, half, symmetric, dtype, factors, tiles, codes, scales, zeros, sums):
    """Quantize all rows; return FINISHED, or why not.

    `source` is values, float32 (rows, columns); weights of squared errors, float32 (columns,),
    at most 1; and whether to multiply these with the squares of the values. LANES divides rows
    and the columns of a group. `groups`, float64 (groups,), turns weights into the caller's.
    `half` is half the number of codes, float32, and `factors`, float32, are of the candidates
    (see `proposed`), none for plain rounding. `tiles` are two of float32 and two of uint8, all
    of (columns of a group * LANES,). Filled are `codes`, uint8 (rows, columns), `scales`, float32,
    and `zeros`, uint8, both (rows, groups), and `sums`, float64 (4,), in the order of `ErrorSums`,
    the last one only in a search.
    """
    values, _, by_square = source
    tile, _, code_tile, row_tile = tiles
    rows, columns = values.shape
    group, options = columns // scales.shape[1], (half, symmetric, dtype, factors)
    flat, flat_codes = values.reshape(values.size), codes.reshape(codes.size)
    squared_sum, norm_sum, weighted_sum, rounding_sum = 0.0, 0.0, 0.0, 0.0
    for row in range(0, rows, LANES):
        for index in range(scales.shape[1]):
            first = index * group
            start = row * columns + first
            low, high, odd = loaded(flat, start, columns, group, tile)
            if not every(odd == 0):
                return NOT_FINITE
            unit, inverse_unit, base, scale, offset = rounded_plainly(
                low, high, half, symmetric, dtype
            )
            if not every(scale <= unit * dtype[2]):
                return OVERFLOW
            left, rounding_error = unit, repeat(0.0, LANES)
            if len(factors):
                scale, offset, rounding_error = fitted(
                    source, tiles, first, group, low, high, unit, base, scale, offset, options
                )
                left = repeat(1.0, LANES)
            squared, norm, weighted = encoded(
                source, tiles, first, group, left, scale, offset, half
            )
            for column in range(0, group, LANES):
                transpose(code_tile, column * LANES, LANES, row_tile, column, group)
            # A row at a time: rows may lie a power of two apart, where few fit into a cache at once.
            for number in range(LANES):
                for column in range(0, group, LANES):
                    some = load(row_tile, number * group + column, LANES)
                    store(flat_codes, start + number * columns + column, some)
            # From here on, row by row: first to memory, where single numbers are at hand.
            store(tile, 0, scale * inverse_unit)
            store(tile, LANES, offset + half)
            store(tile, 2 * LANES, inverse_unit)
            store(tile, 3 * LANES, squared)
            store(tile, 4 * LANES, norm)
            store(tile, 5 * LANES, weighted)
            store(tile, 6 * LANES, rounding_error)
            for number in range(LANES):
                scales[row + number, index] = tile[number]
                zeros[row + number, index] = np.uint8(np.int32(tile[LANES + number]))
                square = np.float64(tile[2 * LANES + number]) ** 2
                weight_square = square * groups[index] * (square if by_square else 1.0)
                squared_sum += tile[3 * LANES + number] * square
                norm_sum += tile[4 * LANES + number] * square
                weighted_sum += tile[5 * LANES + number] * weight_square
                rounding_sum += tile[6 * LANES + number] * weight_square
    sums[0], sums[1], sums[2], sums[3] = squared_sum, norm_sum, weighted_sum, rounding_sum
    return FINISHED
