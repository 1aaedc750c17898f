"""The inner loops of `integer`: a scale, a zero point and codes for each group of each row.

Rows go side by side, see `lanes`. A group is first multiplied with a power of two, which is
exact, such that its largest magnitude lies from 1 to 2: squares can then neither overflow
nor vanish, whatever the unit of the weights.

Codes are signed here, from -half to half - 1, and a value is (code - offset) * scale;
k stands for code - offset.
"""

from __future__ import annotations

import numpy as np

from gguf2st.quantize.jit import inlined, kernel, multiply_add
from gguf2st.quantize.lanes import LANES, MARGIN, TILE, load, store

f32, i32 = np.float32, np.int32

# Dtypes of scales: bits of float32's mantissa that they lack, their smallest number, their largest.
F32 = (0, f32(2**-149), f32(3.4028235e38))
F16 = (13, f32(2**-24), f32(65504))
BF16 = (16, f32(2**-133), f32(3.3895314e38))
ROUNDER = f32(1.5 * 2**23)
FINISHED, NOT_FINITE, OVERFLOW = 0, 1, 2  # what `fit_rows` returns

# Where in `state` a number of each lane begins. It is one flat array because the compiler
# has to prove that what it reads and writes doesn't overlap before it makes vector code.
LOW, HIGH, FINITE = 0, 16, 32
UNIT = 48  # of each lane four times, see `to_unit`
BASE = 112  # the scale of plain rounding before it is rounded itself
INVERSE, FROM, TO, FROM_2, TO_2 = 128, 144, 160, 176, 192  # 1 / scale and k of a candidate
XK, KK, XK_2, KK_2 = 208, 224, 240, 256  # sums
BEST_SCORE, BEST_SCALE, BEST_FROM = 272, 288, 304  # the best candidate
SCALE, OFFSET, ERROR = 320, 336, 352  # being tried
PICK_SCALE, PICK_OFFSET, REFINED_SCALE, REFINED_FROM = 368, 384, 400, 416  # the best tried
SQUARED, NORM, WEIGHTED = 432, 448, 464
MAGNITUDE, STEPS, ROUNDED = 480, 496, 512  # between steps of a calculation
STATE_SIZE = 528


@kernel
def extremes(tile, columns, state):
    """Widen LOW and HIGH to hold the tile; FINITE turns into NaN if a value isn't finite."""
    for column in range(columns):
        for lane in range(LANES):
            value = tile[column, lane]
            state[LOW + lane] = np.fmin(state[LOW + lane], value)
            state[HIGH + lane] = np.fmax(state[HIGH + lane], value)
            state[FINITE + lane] += value - value


@kernel
def to_unit(tile, weight_tile, weights, columns, state, by_square):
    """Multiply the tile with UNIT; fill in the weights of the squared errors of its elements."""
    flat, flat_weights = tile.ravel(), weight_tile.ravel()
    # Four columns at a time: the compiler would unroll a loop of sixteen, not vectorize it.
    for start in range(0, columns * LANES, 4 * LANES):
        for index in range(4 * LANES):
            flat[start + index] *= state[UNIT + index]
    if by_square:
        for index in range(columns * LANES):
            flat_weights[index] = weights[index] * flat[index] * flat[index]
    else:
        for index in range(columns * LANES):
            flat_weights[index] = weights[index]


@kernel
def score(tile, weight_tile, columns, state):
    """Sum x * k and k * k (weighted) for one scale and two windows of k."""
    for column in range(columns):
        for lane in range(LANES):
            value, weight = tile[column, lane], weight_tile[column, lane]
            # Adding 1.5 * 2**23 rounds to an integer, one instruction cheaper than np.rint.
            nearest = multiply_add(value, state[INVERSE + lane], ROUNDER) - ROUNDER
            k = nearest if nearest > state[FROM + lane] else state[FROM + lane]
            k = k if k < state[TO + lane] else state[TO + lane]
            weighted = weight * k
            state[XK + lane] = multiply_add(weighted, value, state[XK + lane])
            state[KK + lane] = multiply_add(weighted, k, state[KK + lane])
            k = nearest if nearest > state[FROM_2 + lane] else state[FROM_2 + lane]
            k = k if k < state[TO_2 + lane] else state[TO_2 + lane]
            weighted = weight * k
            state[XK_2 + lane] = multiply_add(weighted, value, state[XK_2 + lane])
            state[KK_2 + lane] = multiply_add(weighted, k, state[KK_2 + lane])


@kernel
def measure(tile, weight_tile, columns, state, half):
    """Sum x * k, k * k and the squared error (all weighted) of encoding with SCALE and OFFSET."""
    highest = half - f32(1)
    for column in range(columns):
        for lane in range(LANES):
            value, weight = tile[column, lane], weight_tile[column, lane]
            scale, offset = state[SCALE + lane], state[OFFSET + lane]
            code = value / scale + offset
            code = code if code > -half else -half
            code = code if code < highest else highest
            k = np.rint(code) - offset
            error = value - k * scale
            weighted = weight * k
            state[XK + lane] = multiply_add(weighted, value, state[XK + lane])
            state[KK + lane] = multiply_add(weighted, k, state[KK + lane])
            state[ERROR + lane] = multiply_add(weight * error, error, state[ERROR + lane])


@kernel
def encode(tile, weight_tile, code_tile, columns, state, half):
    """Fill `code_tile` with unsigned codes of PICK_SCALE and PICK_OFFSET; sum up the errors."""
    highest = half - f32(1)
    for column in range(columns):
        for lane in range(LANES):
            value, weight = tile[column, lane], weight_tile[column, lane]
            scale, offset = state[PICK_SCALE + lane], state[PICK_OFFSET + lane]
            code = value / scale + offset
            code = code if code > -half else -half
            code = code if code < highest else highest
            code = np.rint(code)
            code_tile[column, lane] = np.uint8(np.int32(code + half))
            error = value - (code - offset) * scale
            state[SQUARED + lane] = multiply_add(error, error, state[SQUARED + lane])
            state[WEIGHTED + lane] = multiply_add(weight * error, error, state[WEIGHTED + lane])
            state[NORM + lane] = multiply_add(value, value, state[NORM + lane])


@kernel
def round_scales(state, words, dtype):
    """Round SCALE to a dtype, in the unit of the weights; `words` is `state` seen as int32.

    A scale that would become zero becomes the smallest number of the dtype.
    """
    missing, smallest, _ = dtype
    for lane in range(LANES):
        state[SCALE + lane] /= state[UNIT + lane]
        # Below the normal numbers of F16, its steps are 2**-24.
        state[STEPS + lane] = np.rint(state[SCALE + lane] * f32(2**24)) * f32(2**-24)
    if missing:
        below_half = i32(i32(1 << (missing - 1)) - 1)
        for lane in range(LANES):
            word = words[SCALE + lane]
            odd = i32(i32(word >> missing) & 1)
            words[ROUNDED + lane] = i32(i32(word + below_half + odd) & -(1 << missing))
        for lane in range(LANES):
            small = missing == 13 and abs(state[SCALE + lane]) < f32(2**-14)
            state[SCALE + lane] = state[(STEPS if small else ROUNDED) + lane]
    for lane in range(LANES):
        scale = state[SCALE + lane]
        state[SCALE + lane] = (smallest if scale == f32(0) else scale) * state[UNIT + lane]


@kernel
def prepare(state, words, half, symmetric, dtype):
    """From LOW and HIGH, find UNIT, BASE and the pick of plain rounding.

    It has the numbers of compressed-tensors (`calculate_qparams`): the scale is rounded to
    its dtype after the offset was found with the exact one.
    """
    levels = half + half - f32(1)
    for lane in range(LANES):
        state[MAGNITUDE + lane] = np.fmax(-state[LOW + lane], state[HIGH + lane])
    for lane in range(4 * LANES):
        exponent = i32(i32(words[MAGNITUDE + lane % LANES] >> 23) - 127)
        exponent = min(max(exponent, i32(-126)), i32(126))
        words[UNIT + lane] = i32(i32(127 - exponent) << 23)
    for lane in range(LANES):
        low, high, unit = state[LOW + lane], state[HIGH + lane], state[UNIT + lane]
        scale = state[MAGNITUDE + lane] / (levels / f32(2))
        offset = f32(0)
        if not symmetric:
            scale = (high - low) / levels
            offset = -half - low / scale
            offset = np.rint(np.fmin(np.fmax(offset, -half), half - f32(1)))
        # A group of zeros has scale 1.
        zeros = state[MAGNITUDE + lane] == f32(0)
        state[OFFSET + lane] = f32(0) if zeros else offset
        state[SCALE + lane] = unit if zeros else scale * unit
        state[BASE + lane] = unit if zeros else scale * unit
        state[LOW + lane], state[HIGH + lane] = low * unit, high * unit
    round_scales(state, words, dtype)
    finite, fits = True, True
    for lane in range(LANES):
        finite = finite and state[FINITE + lane] == f32(0)
        fits = fits and state[SCALE + lane] <= dtype[2] * state[UNIT + lane]
        state[PICK_SCALE + lane] = state[SCALE + lane]
        state[PICK_OFFSET + lane] = state[OFFSET + lane]
    if not finite:
        return NOT_FINITE
    return FINISHED if fits else OVERFLOW


@kernel
def propose(state, factor, half, symmetric):
    """Set a candidate: a scale, BASE times a factor, and two windows of k.

    Factor 0 stands for the scale that takes the largest magnitude to code -half.
    """
    width = half + half - f32(1)
    for lane in range(LANES):
        low, base = state[LOW + lane], state[BASE + lane]
        scale = base * factor
        # What clipping takes away, it takes from both ends: windows stay in proportion.
        steady = np.fmax(scale, base)
        if factor == f32(0):
            scale = steady = np.fmax(-low, state[HIGH + lane]) / half
        first = -half
        if not symmetric:
            first = np.fmin(np.fmax(np.floor(low / steady), -width), f32(-1))
        state[INVERSE + lane] = f32(1) / scale
        state[FROM + lane], state[TO + lane] = first, first + width
        state[FROM_2 + lane], state[TO_2 + lane] = first + f32(1), first + half + half


@kernel
def keep_best(state):
    """Keep a window if it explains most of the values, sum(xk)^2 / sum(kk), and its best scale."""
    for lane in range(LANES):
        best, best_scale = state[BEST_SCORE + lane], state[BEST_SCALE + lane]
        best_from = state[BEST_FROM + lane]
        first, second = state[FROM + lane], state[FROM_2 + lane]
        xk, xk_2 = state[XK + lane], state[XK_2 + lane]
        scale, scale_2 = xk / state[KK + lane], xk_2 / state[KK_2 + lane]
        score, score_2 = scale * xk, scale_2 * xk_2
        best_scale = scale if score > best else best_scale
        best_from = first if score > best else best_from
        best = score if score > best else best
        state[BEST_SCALE + lane] = scale_2 if score_2 > best else best_scale
        state[BEST_FROM + lane] = second if score_2 > best else best_from
        state[BEST_SCORE + lane] = score_2 if score_2 > best else best


@kernel
def settle(state, words, half, symmetric, dtype):
    """Turn the best candidate into SCALE, rounded to its dtype, and OFFSET.

    Where the dtype can't hold the scale, they fall back to the pick.
    """
    for lane in range(LANES):
        scale, first = state[BEST_SCALE + lane], state[BEST_FROM + lane]
        # The window from -half + 1 to half is the symmetric one with a negative scale.
        state[SCALE + lane] = -scale if symmetric and first != -half else scale
        state[OFFSET + lane] = f32(0) if symmetric else -half - first
    round_scales(state, words, dtype)
    for lane in range(LANES):
        if not abs(state[SCALE + lane]) <= dtype[2] * state[UNIT + lane]:
            state[SCALE + lane] = state[PICK_SCALE + lane]
            state[OFFSET + lane] = state[PICK_OFFSET + lane]


@inlined
def fetch(source, row, column, columns, tile, weight_tile, state):
    """Load a tile and bring it into the unit of its groups."""
    values, weights, by_square = source
    load(values, row, column, columns, tile)
    to_unit(tile, weight_tile, weights[column * LANES :], columns, state, by_square)


@inlined
def search(source, row, start, stop, half, symmetric, factors, sums, scratch):
    """Find the best candidate of the group; `sums` keeps theirs between tiles."""
    tile, weight_tile, _, state, _ = scratch
    for lane in range(LANES):
        state[BEST_SCORE + lane], state[BEST_SCALE + lane] = f32(0), f32(1)
        state[BEST_FROM + lane] = -half
    for column in range(start, stop, TILE):
        columns = min(TILE, stop - column)
        if stop - start > TILE:
            fetch(source, row, column, columns, tile, weight_tile, state)
        for number in range(len(factors)):
            propose(state, factors[number], half, symmetric)
            for index in range(4 * LANES):
                state[XK + index] = f32(0) if column == start else sums[number, index]
            score(tile, weight_tile, columns, state)
            if column + columns == stop:
                keep_best(state)
            else:
                for index in range(4 * LANES):
                    sums[number, index] = state[XK + index]


@inlined
def attempt(source, row, start, stop, half, first, scratch):
    """Measure SCALE and OFFSET over the group; make them the pick where their error is less.

    The `first` attempt, plain rounding, always becomes the pick, and later ones have to
    beat it by MARGIN. Rows of `errors`: of this attempt, of the pick, of plain rounding.
    """
    tile, weight_tile, _, state, errors = scratch
    for lane in range(LANES):
        state[XK + lane], state[KK + lane], errors[0, lane] = f32(0), f32(0), 0.0
    for column in range(start, stop, TILE):
        columns = min(TILE, stop - column)
        if stop - start > TILE:
            fetch(source, row, column, columns, tile, weight_tile, state)
        for lane in range(LANES):
            state[ERROR + lane] = f32(0)
        measure(tile, weight_tile, columns, state, half)
        for lane in range(LANES):
            errors[0, lane] += state[ERROR + lane]
    for lane in range(LANES):
        if first or errors[0, lane] < errors[1, lane]:
            errors[1, lane] = errors[0, lane]
            scale, offset = state[SCALE + lane], state[OFFSET + lane]
            state[PICK_SCALE + lane], state[PICK_OFFSET + lane] = scale, offset
            # Least squares: the best scale for these codes.
            xk, kk = state[XK + lane], state[KK + lane]
            refined = xk / kk if kk > f32(0) else scale
            state[REFINED_SCALE + lane] = abs(refined)
            state[REFINED_FROM + lane] = -half - offset + (f32(1) if refined < f32(0) else f32(0))
        if first:
            errors[1, lane] *= MARGIN
            errors[2, lane] = errors[0, lane]


@inlined
def finish(source, row, start, stop, half, units, codes, sums, scratch):
    """Encode the group with the pick; `units` turns SQUARED, NORM, WEIGHTED into the caller's."""
    tile, weight_tile, code_tile, state, _ = scratch
    for column in range(start, stop, TILE):
        columns = min(TILE, stop - column)
        if stop - start > TILE:
            fetch(source, row, column, columns, tile, weight_tile, state)
        for index in range(SQUARED, WEIGHTED + LANES):
            state[index] = f32(0)
        encode(tile, weight_tile, code_tile, columns, state, half)
        store(code_tile, row, column, columns, codes)
        for lane in range(LANES):
            sums[0, lane] += state[SQUARED + lane] * units[0, lane]
            sums[1, lane] += state[NORM + lane] * units[0, lane]
            sums[2, lane] += state[WEIGHTED + lane] * units[1, lane]


@kernel
def fit_rows(source, groups, half, symmetric, dtype, factors, scratch, codes, scales, zeros, sums):
    """Quantize all rows; return FINISHED, or why not.

    `source` is values, float32 (rows, columns); weights of squared errors, float32
    (columns * LANES,), at most 1, each column's repeated; and whether to multiply these with
    the squares of the values. `groups`, float64 (groups,), turns weights into the caller's.
    `half` is half the number of codes, float32, and `factors`, float32, are of the candidates
    (see `propose`), none for plain rounding. `scratch` is from `lanes.scratch`. Filled are
    `codes`, uint8 (rows, columns), `scales`, float32, and `zeros`, uint8, both (rows,
    groups), and `sums`, float64 (4, LANES), in the order of `ErrorSums`, the last one only
    in a search.
    """
    tile, weight_tile, _, state, errors = scratch
    words, units = state.view(np.int32), np.zeros((2, LANES), np.float64)
    values, weights, by_square = source
    group = values.shape[1] // scales.shape[1]
    # With many codes, sums can't tell candidates apart: each of them is measured.
    fine, signs = half > f32(8), 2 if symmetric else 1
    candidates = np.empty((len(factors), 4 * LANES), np.float32)
    attempts = 0
    if len(factors):
        attempts = 2 + (signs * len(factors) if fine else 1)
    for row in range(0, values.shape[0], LANES):
        for index in range(scales.shape[1]):
            start, stop = index * group, index * group + group
            for lane in range(LOW, UNIT):
                state[lane] = f32(0)
            for column in range(start, stop, TILE):
                columns = min(TILE, stop - column)
                load(values, row, column, columns, tile)
                extremes(tile, columns, state)
            status = prepare(state, words, half, symmetric, dtype)
            if status != FINISHED:
                return status
            if group <= TILE:
                to_unit(tile, weight_tile, weights[start * LANES :], group, state, by_square)
            if attempts and not fine:
                search(source, row, start, stop, half, symmetric, factors, candidates, scratch)
            for step in range(attempts):
                if step == attempts - 1:
                    for lane in range(2 * LANES):
                        state[BEST_SCALE + lane] = state[REFINED_SCALE + lane]
                elif step > 0 and fine:
                    propose(state, factors[(step - 1) // signs], half, symmetric)
                    first = FROM if (step - 1) % signs == 0 else FROM_2
                    for lane in range(LANES):
                        state[BEST_SCALE + lane] = f32(1) / state[INVERSE + lane]
                        state[BEST_FROM + lane] = state[first + lane]
                if step > 0:
                    settle(state, words, half, symmetric, dtype)
                attempt(source, row, start, stop, half, step == 0, scratch)
            for lane in range(LANES):
                unit = 1 / (np.float64(state[UNIT + lane]) ** 2)
                units[0, lane] = unit
                units[1, lane] = unit * groups[index] * (unit if by_square else 1.0)
                sums[3, lane] += errors[2, lane] * units[1, lane]
            finish(source, row, start, stop, half, units, codes, sums, scratch)
            for lane in range(min(LANES, values.shape[0] - row)):
                scales[row + lane, index] = state[PICK_SCALE + lane] / state[UNIT + lane]
                zeros[row + lane, index] = np.uint8(np.int32(state[PICK_OFFSET + lane] + half))
    return FINISHED
