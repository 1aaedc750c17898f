"""What the kernels of `integer_kernels` do with sixteen lines: formulas with loops.

A line is a group of a row. `source` is values, float32, one line after the other or row by row; weights of
squared errors, float32 (columns,), or None; whether to multiply these with the squares of the values; and
units of the weights, float64 (groups of a row,).
"""

import operator

from gguf2st.quantize.integer_scales import (
    LANES,
    MARGIN,
    clipped,
    proposed,
    refined,
    settled,
)
from gguf2st.vectors import (
    absolute,
    branch,
    bytes_of,
    choose,
    doubles,
    every,
    formula,
    integers,
    lane,
    larger,
    load,
    loop,
    multiply_add,
    nearest,
    repeat,
    smaller,
    store,
    transpose,
    transposed,
)

STRETCH = 128  # columns whose errors are summed up for themselves, which keeps sums exact
ROUNDER = 1.5 * 2**23  # added to a number below 2**22, it leaves no place for a fraction

# Where a kernel keeps a number of each line, and two vectors of each, in `lines`.
UNIT, INVERSE_UNIT, SCALE, OFFSET, INVERSE_SCALE, LOWS = range(0, 6 * LANES, LANES)
HIGHS = LOWS + LANES * LANES
LINES_SIZE = HIGHS + LANES * LANES


def _extended(extremes, value):
    low, high, odd = extremes
    # An infinity or a NaN leaves a NaN.
    return smaller(value, low), larger(value, high), multiply_add(value, 0.0, odd)


def _of_lines(lines, place, operation):
    """What an operation makes of each of 16 vectors that lie one after the other, a lane each."""
    left = transposed([load(lines, place + LANES * line, LANES) for line in range(LANES)])
    while len(left) > 1:
        left = [operation(*pair) for pair in zip(left[::2], left[1::2], strict=True)]
    return left[0]


@formula
def extremes_of_lines(values, start, group, lines):
    """The least and the greatest value of each line, 0 among them, and 0 or, where one is odd, NaN.

    The lines lie one after the other from value `start` on.
    """
    zero = repeat(0.0, LANES)

    def line_extremes(line, odd):
        first = start + line * group

        def step(place, *extremes):
            return _extended(extremes, load(values, place, LANES))

        low, high, odd = loop(first, first + group, LANES, step, zero, zero, odd)
        store(lines, LOWS + line * LANES, low)
        store(lines, HIGHS + line * LANES, high)
        return odd

    (odd,) = loop(0, LANES, 1, line_extremes, zero)
    return _of_lines(lines, LOWS, smaller), _of_lines(lines, HIGHS, larger), odd


@formula
def extremes_of_rows(values, start, columns, group, tile):
    """The same of a group of 16 rows, which is laid out transposed in a tile."""
    zero = repeat(0.0, LANES)

    def some_columns(first, *extremes):
        transpose(values, start + first, columns, tile, first * LANES, LANES)
        for column in range(LANES):
            extremes = _extended(extremes, load(tile, (first + column) * LANES, LANES))
        return extremes

    return loop(0, group, LANES, some_columns, zero, zero, zero)


@formula
def encoded(source, found, lines, places, shape, half, codes, totals):
    """Write the codes of sixteen lines; return `totals` with their errors.

    `found` are the unit of each line and its inverse, its scale and its offset in units. `places`
    are where the first line begins, among values and among codes, and how far it is to the
    next; and the number of the first one's group in its row, and how far it is to the next one's,
    where the first group comes after the last. `shape` is the size of a group, and how many a row has.
    `totals` are sums of squared errors, squares and, where there are weights, weighted errors:
    vectors of float64.
    """
    start, code, stride, number, shift = places
    group, groups = shape
    for place, vector in enumerate((*found, 1.0 / found[2])):
        store(lines, UNIT + LANES * place, vector)

    def encode_line(line, start, code, number, *totals):
        places = start, code, number * group
        found = (load(lines, place + line) for place in (UNIT, SCALE, OFFSET, INVERSE_SCALE))
        sums = _encode_line(source, found, places, group, half, codes)
        factors = _factors_of_errors(source, load(lines, INVERSE_UNIT + line), number)
        new = (
            multiply_add(doubles(sum_), factor, total)
            for total, sum_, factor in zip(totals, sums, factors, strict=False)
        )
        following = choose(number + shift == groups, 0, number + shift)
        return start + stride, code + stride, following, *new

    return loop(0, LANES, 1, encode_line, start, code, number, *totals)[3:]


@formula
def no_errors(source):
    """Totals to begin with."""
    return (doubles(repeat(0.0, LANES)),) * (2 if source[1] is None else 3)


@formula
def store_sums(totals, sums):
    """Write the sums of the lanes of totals to the first elements of an array."""
    for place, total in enumerate(totals):
        store(sums, place, sum(lane(total, number) for number in range(LANES)))


def _factors_of_errors(source, inverse_unit, number):
    """What sums of squared errors, squares and weighted errors of a line are multiplied with."""
    _, _, by_square, units = source
    square = doubles(inverse_unit) * doubles(inverse_unit)
    return square, square, square * load(units, number) * choose(by_square, square, 1.0)


@formula
def weighted_errors(source, inverse_unit, number, error, total):
    """A total with the weighted errors of sixteen lines of the same group, vectors all."""
    factor = _factors_of_errors(source, inverse_unit, number)[2]
    return multiply_add(doubles(error), factor, total)


def _encode_line(source, found, places, group, half, codes):
    """Write the codes of a line; return squared errors, squares and weighted errors, each in parts."""
    values, weights, by_square, _ = source
    unit, scale, offset, inverse = found
    start, code_start, column = places
    nothing = (repeat(0.0, LANES),) * (2 if weights is None else 3)

    def stretch(first, *total):
        def encode(place, *sums):
            value = load(values, start + place, LANES) * unit
            # A product is quicker than the quotient, and off by so little that only near a tie
            # they can round to different codes.
            code = multiply_add(value, inverse, offset)
            clear = every(absolute(code - nearest(code)) < 0.5 - 2**-12)
            code = branch(clear, lambda: code, lambda: value / scale + offset)
            code = nearest(clipped(code, -half, half - 1))
            store(codes, code_start + place, bytes_of(integers(code + half)))
            error = value - (code - offset) * scale
            terms = [(error, error), (value, value)]
            if weights is not None:
                weight = load(weights, column + place, LANES)
                weight = choose(by_square, weight * value * value, weight)
                terms.append((weight * error, error))
            return tuple(multiply_add(*term, sum_) for term, sum_ in zip(terms, sums, strict=True))

        sums = loop(first, smaller(first + STRETCH, group), LANES, encode, *nothing)
        return tuple(map(operator.add, total, sums))

    return loop(0, group, STRETCH, stretch, *nothing)


@formula
def scattered(array, index, step, vector):
    """Write the lanes of a vector to an array, `step` apart."""

    def write(line, index):
        store(array, index, lane(vector, line))
        return index + step

    loop(0, LANES, 1, write, index)


@formula
def in_units(source, tiles, unit, number, group):
    """Turn a tile into units, and write its weights beside it."""
    _, weights, by_square, _ = source
    tile, weight_tile = tiles

    def turn(column):
        value = load(tile, column * LANES, LANES) * unit
        weight = load(weights, number * group + column)
        store(tile, column * LANES, value)
        store(weight_tile, column * LANES, choose(by_square, weight * value * value, weight))

    loop(0, group, 1, turn)


@formula
def fitted(tiles, group, extremes, options, plain):
    """The scale and the offset of the best attempt, and the error of the first, plain rounding.

    `extremes` are the least and the greatest of each line in units. `plain` are the unit, and plain
    rounding's scale before and after it is stored, and its offset. `options` are half the number
    of codes, whether offsets are 0, the dtype of scales, and how many factors there are of the
    candidates, and what they are.
    """
    unit, base, scale, offset = plain
    half, symmetric, dtype, count, factors = options
    first = _attempt(tiles, group, scale, offset, half)
    # With many codes, sums can't tell candidates apart: each of them is measured.
    fine, many = half > 8, choose(symmetric, count + count, count)
    attempts = choose(fine, many, 1)

    def search():
        return _searched(tiles, group, extremes, base, count, factors, half, symmetric)

    def propose(step):
        factor = load(factors, choose(symmetric, step >> 1, step))
        scale, window = proposed(*extremes, base, factor, half, symmetric)
        return scale, window + choose(symmetric, step & 1, 0)

    def attempt(step, *best):
        tried, window = branch(
            step == attempts,
            lambda: refined(best, half),
            lambda: branch(fine, lambda: propose(step), search),
        )
        tried, offset = settled(tried, window, unit, best, half, symmetric, dtype)
        new = _attempt(tiles, group, tried, offset, half)
        return tuple(
            choose(new[0] < best[0], one, other) for one, other in zip(new, best, strict=True)
        )

    best = loop(0, attempts + 1, 1, attempt, first[0] * MARGIN, *first[1:])
    return best[1], best[2], first[0]


def _attempt(tiles, group, scale, offset, half):
    """The weighted squared error of a scale, the scale, its offset, sums of value * k and k * k."""
    zero = repeat(0.0, LANES)

    def stretch(first, xk, kk, total):
        def measure(place, xk, kk, errors):
            value, weight = (load(tile, place, LANES) for tile in tiles)
            k = nearest(clipped(value / scale + offset, -half, half - 1)) - offset
            error = value - k * scale
            return (
                multiply_add(weight * k, value, xk),
                multiply_add(weight * k, k, kk),
                multiply_add(weight * error, error, errors),
            )

        stop = smaller(first + STRETCH, group) * LANES
        xk, kk, errors = loop(first * LANES, stop, LANES, measure, xk, kk, zero)
        return xk, kk, total + errors

    xk, kk, total = loop(0, group, STRETCH, stretch, zero, zero, zero)
    return total, scale, offset, xk, kk


def _searched(tiles, group, extremes, base, count, factors, half, symmetric):
    """The scale and the first k of the window that explain most of the values.

    What a window of k explains with its best scale is sum(value * k)^2 / sum(k * k). A factor
    stands for a scale and two windows of k.
    """
    zero = repeat(0.0, LANES)

    def explain(number, *best):
        scale, window = proposed(*extremes, base, load(factors, number), half, symmetric)
        inverse = repeat(1.0, LANES) / scale
        last = window + (half + half - 1)

        def add(place, *sums):
            value, weight = (load(tile, place, LANES) for tile in tiles)
            code = multiply_add(value, inverse, ROUNDER) - ROUNDER
            ks = (clipped(code, window + shift, last + shift) for shift in (0, 1))
            terms = [(weight * k, other) for k in ks for other in (value, k)]
            return tuple(multiply_add(*term, sum_) for term, sum_ in zip(terms, sums, strict=True))

        sums = loop(0, group * LANES, LANES, add, zero, zero, zero, zero)
        for shift in (0, 1):
            xk, kk = sums[2 * shift : 2 * shift + 2]
            new = (xk * (xk / kk), xk / kk, window + shift)
            better = new[0] > best[0]
            best = tuple(choose(better, one, other) for one, other in zip(new, best, strict=True))
        return best

    start = zero, repeat(1.0, LANES), repeat(-half, LANES)
    _, scale, window = loop(0, count, 1, explain, *start)
    return scale, window
