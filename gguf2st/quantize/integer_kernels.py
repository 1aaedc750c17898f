"""The inner loops of `integer`: a scale, a zero point and codes for each group of each row.

Sixteen lines go side by side; a line is a group of a row. What a line has one of (extremes, a scale)
is a lane of a vector. Lines are counted in units that are powers of two, which is exact, such that
their largest magnitude lies from 1 to 2: squares can then neither overflow nor vanish,
whatever the unit of the weights. Errors are summed up line by line, so they are the same whatever
chunk a line came in.
"""

from __future__ import annotations

from gguf2st.gguf.blocks.kernels.fused import decode
from gguf2st.jit import kernel
from gguf2st.quantize.integer_lines import (
    LINES_SIZE,
    encoded,
    extremes_of_lines,
    extremes_of_rows,
    fitted,
    in_units,
    no_errors,
    scattered,
    store_sums,
    weighted_errors,
)
from gguf2st.quantize.integer_scales import LANES, rounded_plainly
from gguf2st.quantize.scale_formulas import fits
from gguf2st.vectors import bytes_of, every, integers, store

__all__ = [
    "FINISHED",
    "LANES",
    "LINES_SIZE",
    "NOT_FINITE",
    "OVERFLOW",
    "fit_rows",
    "round_rows",
]

FINISHED, NOT_FINITE, OVERFLOW = 0, 1, 2  # what the kernels return


@kernel
def round_rows(packed, source, group, half, symmetric, dtype, lines, results):
    """Round all lines plainly; return FINISHED, or why not.

    `packed` is the address of a decoder, whole blocks, and the bytes and elements of one; values
    then are memory for those of some lines, of whole blocks. Without an address, the
    values are there.

    `source` is values, float32 (lines * group,), row by row; weights of squared errors, float32
    (columns,), at most 1, or None; whether to multiply these with the squares of the values; and
    `units`, float64 (groups of a row,), which turn weights into the caller's. LANES divides
    `group` and the number of lines. `half` is half the number of codes, float32. `lines` is float32
    (LINES_SIZE,) to work in. `results` are filled: codes, uint8 (lines * group,); scales, float32,
    and zeros, uint8, both (lines,); and sums, float64 (4,), in the order of `ErrorSums`: the
    first two, and the third where there are weights.
    """
    decoder, raw, block_bytes, block_size = packed
    values, _, _, units = source
    codes, scales, zeros, sums = results
    groups, totals, block = units.size, no_errors(source), 0
    for index in range(0, scales.size, LANES):
        start = index * group % values.size
        if decoder and start == 0:
            size = min(values.size, codes.size - index * group)
            stop = block + size // block_size
            decode(decoder, raw[block * block_bytes : stop * block_bytes], values[:size])
            block = stop
        low, high, odd = extremes_of_lines(values, start, group, lines)
        if not every(odd == 0):
            return NOT_FINITE
        unit, inverse_unit, _, scale, offset = rounded_plainly(low, high, half, symmetric, dtype)
        if not every(fits(scale, unit, dtype)):
            return OVERFLOW
        store(scales, index, scale * inverse_unit)
        store(zeros, index, bytes_of(integers(offset + half)))
        found = (unit, inverse_unit, scale, offset)
        places = (start, index * group, group, index % groups, 1)
        totals = encoded(source, found, lines, places, (group, groups), half, codes, totals)
    store_sums(totals, sums)
    return FINISHED


@kernel
def fit_rows(source, half, symmetric, dtype, factors, tiles, lines, results):
    """Search for the best scale of each line; return FINISHED, or why not.

    Arguments are those of `round_rows`, but there are weights, LANES divides the number of rows,
    and all sums are filled. `factors`, float32, are of the candidates (see `proposed`), and
    `tiles` two of float32 (group * LANES,) to work in: a lane of theirs is a line, of values in
    units and of their weights.
    """
    values, weights, _, units = source
    columns, groups = weights.size, units.size
    group, options = columns // groups, (half, symmetric, dtype, len(factors), factors)
    codes, scales, zeros, sums = results
    totals = no_errors(source)
    rounding = totals[0]
    for row in range(0, scales.size // groups, LANES):
        for number in range(groups):
            start = row * columns + number * group
            low, high, odd = extremes_of_rows(values, start, columns, group, tiles[0])
            if not every(odd == 0):
                return NOT_FINITE
            unit, inverse_unit, base, scale, offset = rounded_plainly(
                low, high, half, symmetric, dtype
            )
            if not every(fits(scale, unit, dtype)):
                return OVERFLOW
            in_units(source, tiles, unit, number, group)
            scale, offset, error = fitted(
                tiles, group, (low * unit, high * unit), options, (unit, base, scale, offset)
            )
            index = row * groups + number
            scattered(scales, index, groups, scale * inverse_unit)
            scattered(zeros, index, groups, bytes_of(integers(offset + half)))
            found = (unit, inverse_unit, scale, offset)
            places = (start, start, columns, number, 0)
            totals = encoded(source, found, lines, places, (group, groups), half, codes, totals)
            rounding = weighted_errors(source, inverse_unit, number, error, rounding)
    store_sums((totals[0], totals[1], totals[2], rounding), sums)
    return FINISHED
