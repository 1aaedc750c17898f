"""The inner loops of decoding and of comparing: codes as numbers, rows of a `Grid` as values, sums."""

from __future__ import annotations

import numpy as np

from gguf2st.jit import kernel, part
from gguf2st.vectors import (
    absolute,
    doubles,
    every,
    formula,
    lane,
    load,
    loop,
    multiply_add,
    repeat,
    store,
    widen_half,
)
from gguf2st.verification.grids import Change

TILE = 32  # columns whose words lie in as many lines of the first cache
LANES = 16
STRETCH = 512  # columns that are summed up in float32
PLUS_ONE, NEGATIVE_POWER = int(Change.PLUS_ONE), int(Change.NEGATIVE_POWER)

f32, i32 = np.float32, np.int32


@kernel
def widen_halves(halves, numbers):
    """Rows of half-precision numbers (bits as uint16) as float32; four times as fast as numpy."""
    for row in range(len(numbers)):
        half, number = halves[row], numbers[row]
        for column in range(len(number)):
            number[column] = widen_half(half[column])


@kernel
def unpack(codes, bits, table, numbers):
    """Look up codes of 2, 4 or 8 bits that lie along rows of bytes, the first in the lowest bits."""
    per, mask = 8 // bits, (1 << bits) - 1
    rows, columns = numbers.shape
    for row in range(rows):
        for place in range(per):
            shift = place * bits
            for byte in range((columns - place + per - 1) // per):
                numbers[row, byte * per + place] = table[codes[row, byte] >> shift & mask]


@kernel
def unpack_outputs(words, places, mask, numbers):
    """Words (in, out / per) that hold codes of several rows, at `places` (bits) in them."""
    per = len(places)
    rows, columns = numbers.shape
    tile = np.empty(TILE, np.int32)
    for begin in range(0, columns, TILE):
        width = min(TILE, columns - begin)
        for word in range(words.shape[1]):
            for column in range(width):
                tile[column] = words[begin + column, word]
            for code in range(min(per, rows - word * per)):
                shift, row = i32(places[code]), word * per + code
                for column in range(width):
                    numbers[row, begin + column] = f32(i32(tile[column] >> shift) & i32(mask))


@kernel
def unpack_inputs(words, bits, numbers):
    """Words (in / per, out) that hold codes of several columns, the first in the lowest bits."""
    per, mask = 32 // bits, i32((1 << bits) - 1)
    rows, columns = numbers.shape
    for word in range(words.shape[0]):
        for row in range(rows):
            value = words[word, row]
            for code in range(min(per, columns - word * per)):
                numbers[row, word * per + code] = f32(i32(value >> i32(code * bits)) & mask)


@kernel
def multiply(grid, values):
    """(number - zero) * factor, for all rows of a grid."""
    bounds, members = grid.runs
    for row in range(len(values)):
        zeros = grid.zeros[min(row, len(grid.zeros) - 1)]
        factors = grid.factors[min(row, len(grid.factors) - 1)]
        for run in range(len(members)):
            start, stop, group = bounds[run], bounds[run + 1], members[run]
            zero, factor = zeros[min(group, len(zeros) - 1)], factors[min(group, len(factors) - 1)]
            # Loops over whole slices become vector code.
            number, value = grid.numbers[row, start:stop], values[row, start:stop]
            for column in range(len(number)):
                value[column] = (number[column] - zero) * factor


@part
def place(grid, row, change, values, steps, inside):
    """Values of a row, how far apart its grid's are there, and whether it goes on on both sides."""
    bounds, members = grid.runs
    spacing = grid.spacing
    zeros = grid.zeros[min(row, len(grid.zeros) - 1)]
    factors = grid.factors[min(row, len(grid.factors) - 1)]
    for run in range(len(members)):
        start, stop, group = bounds[run], bounds[run + 1], members[run]
        zero, factor = zeros[min(group, len(zeros) - 1)], factors[min(group, len(factors) - 1)]
        number, value = grid.numbers[row, start:stop], values[start:stop]
        step, within = steps[start:stop], inside[start:stop]
        size = abs(factor)
        for column in range(len(number)):
            level = number[column] - zero
            value[column] = level * factor
            level = abs(level)
            if spacing.binades:
                below = f32(1) if level < f32(2) else f32(2)
                level = f32(4) if level >= f32(4) else below
            apart = level * spacing.relative
            apart = apart if apart > spacing.smallest else spacing.smallest
            step[column] = apart * size
            within[column] = (number[column] > spacing.low) & (number[column] < spacing.high)
    if change == PLUS_ONE:
        for column in range(grid.numbers.shape[1]):
            values[column] += f32(1)
    if change == NEGATIVE_POWER:
        for column in range(grid.numbers.shape[1]):
            values[column] = -np.exp(values[column])
            steps[column] *= abs(values[column])


@kernel
def place_row(grid, change, values, steps, inside):
    """The same for the first row."""
    place(grid, 0, change, values, steps, inside)


@part
def rescale(values, steps, columns, uncertainty, exact, factor):
    """Multiply a row with factors that are off by at most `uncertainty` of them."""
    for column in range(len(columns)):
        value, step = values[column] * columns[column], steps[column] * abs(columns[column])
        if not exact:  # what the factors are off counts as a step
            off = value * uncertainty[column]
            step = np.sqrt(step * step + f32(12) * off * off)
        values[column], steps[column] = value * factor, step * abs(factor)


@formula
def no_products():
    """Totals to begin with."""
    return (doubles(repeat(0.0, LANES)),) * 5


@formula
def with_products(totals, value, other, step, marks, first, stop):
    """Totals, float64, with some columns of a row; `marks` are sums of columns to be added to.

    They are of squares of differences, of the reference, of values, products of both, squares of steps.
    """
    own_mark, mark = marks

    def add(column, *sums):
        v, r = load(value, column, LANES), load(other, column, LANES)
        s, d = load(step, column, LANES), v - r
        store(mark, column, load(mark, column, LANES) + r)
        store(own_mark, column, load(own_mark, column, LANES) + v)
        pairs = (d, d), (r, r), (v, v), (r, v), (s, s)
        return tuple(multiply_add(*pair, sum_) for pair, sum_ in zip(pairs, sums, strict=True))

    sums = loop(first, stop, LANES, add, *(repeat(0.0, LANES),) * 5)
    return tuple(total + doubles(sum_) for total, sum_ in zip(totals, sums, strict=True))


@formula
def store_totals(totals, sums, place, distance):
    """Write the sum of all lanes of each total, at a place of an array and at others in a distance."""
    for number, total in enumerate(totals):
        found = sum(lane(total, one) for one in range(LANES))
        store(sums, place + distance * number, found)


@formula
def all_allowed(value, other, step, slack, column, shares, floor):
    """Whether all of some values of a row are as near to the reference as they may be."""
    v, r = load(value, column, LANES), load(other, column, LANES)
    s, off = load(step, column, LANES), load(slack, column, LANES)
    return every(absolute(v - r) <= most(absolute(v), absolute(r), s, off, shares, floor))


def most(here, there, step, slack, shares, floor):
    """How far apart two values, or vectors of them, may be."""
    return step * shares[0] + slack * here + (here + there) * shares[1] + floor


allowed = part(most)


@kernel
def add_rows(
    grid, change, columns, uncertainty, factors, exact, reference, homes, limits, rows, sums, marks
):
    """Add what a grid's rows and those of the reference (rows, width) come to.

    `columns` (width,) and `factors` (all rows,) are what values are multiplied with first, and
    `uncertainty` (width,) is how far `columns` are off; all are empty if there is nothing to
    multiply with. Row i is row `homes[i]` of `factors` and `sums` (5, all rows): squares of
    differences, of the reference, of values, products of both, squares of steps. `marks` (2, width) are
    sums of columns. `rows` (6, more than width) are room to work in, at least up to the
    next multiple of `LANES`.

    Unless it isn't `exact`, returns how many values inside of their grids are farther from the
    reference than `limits` allow: so many steps, so much of both magnitudes and so much of the
    row's root mean square.
    """
    width, beyond = reference.shape[1], 0
    end = (width + LANES - 1) // LANES * LANES
    rows[:, :end] = 0
    value, step, other, slack, mark, own_mark = rows[0], rows[1], rows[2], rows[3], rows[4], rows[5]
    slack[: len(uncertainty)] = uncertainty
    inside = np.zeros(end, np.bool_)
    for row in range(len(reference)):
        home = homes[row]
        place(grid, row, change, value, step, inside)
        if len(columns):
            rescale(value, step, columns, uncertainty, exact, factors[home])
        other[:width] = reference[row]
        totals = no_products()
        for first in range(0, end, STRETCH):
            stop = min(first + STRETCH, end)
            totals = with_products(totals, value, other, step, (own_mark, mark), first, stop)
        store_totals(totals, sums, home, sums.shape[1])
        if not exact:
            continue
        shares = limits[0], limits[1]
        floor = limits[2] * f32(np.sqrt(sums[1, home] / width))
        for column in range(0, end, LANES):
            if all_allowed(value, other, step, slack, column, shares, floor):
                continue
            for one in range(column, column + LANES):
                here, there = abs(value[one]), abs(other[one])
                most_of = allowed(here, there, step[one], slack[one], shares, floor)
                beyond += (abs(value[one] - other[one]) > most_of) & inside[one]
    for column in range(width):
        marks[0, column] += mark[column]
        marks[1, column] += own_mark[column]
    return beyond
