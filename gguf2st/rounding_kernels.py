"""The inner loops of `rounding`."""

import numpy as np

from gguf2st.jit import kernel
from gguf2st.vectors import (
    absolute,
    bits_of,
    choose,
    halves_of,
    integers,
    lane,
    load,
    nearest,
    repeat,
    store,
)

LANES = 16


@kernel
def bfloat16(values, out):
    """Fill `out`, uint16, with the upper halves of rounded float32; return how many aren't finite.

    Sizes are multiples of LANES.
    """
    one, found = repeat(1, LANES), repeat(0, LANES)
    for start in range(0, values.size, LANES):
        words = bits_of(load(values, start, LANES))
        rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16
        # Rounding could carry a NaN's low bits into infinity: it stays a quiet NaN of its sign.
        result = choose((words & 0x7FFFFFFF) > 0x7F800000, words >> 16 | 0x40, rounded)
        store(out, start, halves_of(result))
        found = found + choose((result & 0x7F80) == 0x7F80, one, 0)
    count = 0
    for index in range(LANES):
        count += lane(found, index)
    return count


@kernel
def float16(values, out):
    """Fill `out`, uint16, with the bits of half-precision numbers; return how many aren't finite.

    Sizes are multiples of LANES.
    """
    one, found = repeat(1, LANES), repeat(0, LANES)
    for start in range(0, values.size, LANES):
        numbers = load(values, start, LANES)
        words = bits_of(numbers)
        magnitudes = words & 0x7FFFFFFF
        rounded = (magnitudes - 0x38000000 + 0xFFF + (magnitudes >> 13 & 1)) >> 13
        # Below 2**-14, numbers are multiples of 2**-24.
        tiny = integers(nearest(absolute(choose(magnitudes < 0x38800000, numbers, 0)) * 2.0**24))
        result = choose(magnitudes < 0x38800000, tiny, rounded)
        result = choose(magnitudes < 0x47800000, result, 0x7C00)
        result = choose(magnitudes > 0x7F800000, repeat(0x7E00, LANES), result)
        store(out, start, halves_of(result | words >> 16 & 0x8000))
        found = found + choose((result & 0x7C00) == 0x7C00, one, 0)
    count = 0
    for index in range(LANES):
        count += lane(found, index)
    return count


@kernel
def not_finite(values):
    """How many float32 are infinite or not a number; the size is a multiple of LANES."""
    one, found = repeat(1, LANES), repeat(0, LANES)
    for start in range(0, values.size, LANES):
        words = bits_of(load(values, start, LANES))
        found = found + choose((words & 0x7F800000) == 0x7F800000, one, 0)
    count = np.int64(0)
    for index in range(LANES):
        count += lane(found, index)
    return count
