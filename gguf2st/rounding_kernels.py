"""The inner loops of `rounding`; sizes are multiples of LANES."""

from gguf2st.jit import kernel
from gguf2st.vectors import (
    absolute,
    bits_of,
    choose,
    formula,
    halves_of,
    integers,
    lane,
    load,
    nearest,
    repeat,
    store,
)

LANES = 16


@formula
def _as_bfloat16(values, place, out, found):
    words = bits_of(load(values, place, LANES))
    rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16
    # Rounding could carry a NaN's low bits into infinity: it stays a quiet NaN of its sign.
    result = choose((words & 0x7FFFFFFF) > 0x7F800000, words >> 16 | 0x40, rounded)
    store(out, place, halves_of(result))
    return found + choose((result & 0x7F80) == 0x7F80, 1, 0)


@formula
def _as_float16(values, place, out, found):
    numbers = load(values, place, LANES)
    words = bits_of(numbers)
    magnitudes = words & 0x7FFFFFFF
    rounded = (magnitudes - 0x38000000 + 0xFFF + (magnitudes >> 13 & 1)) >> 13
    # Below 2**-14, numbers are multiples of 2**-24.
    tiny = integers(nearest(absolute(choose(magnitudes < 0x38800000, numbers, 0)) * 2.0**24))
    result = choose(magnitudes < 0x38800000, tiny, rounded)
    result = choose(magnitudes < 0x47800000, result, 0x7C00)
    result = choose(magnitudes > 0x7F800000, 0x7E00, result)
    store(out, place, halves_of(result | words >> 16 & 0x8000))
    return found + choose((result & 0x7C00) == 0x7C00, 1, 0)


@formula
def _odd_ones(values, place, found):
    return found + choose((bits_of(load(values, place, LANES)) & 0x7F800000) == 0x7F800000, 1, 0)


@formula
def _in_all(found):
    return sum(lane(found, number) for number in range(LANES))


@kernel
def bfloat16(values, out):
    """Fill `out`, uint16, with the upper halves of rounded float32; return how many aren't finite."""
    found = repeat(0, LANES)
    for place in range(0, values.size, LANES):
        found = _as_bfloat16(values, place, out, found)
    return _in_all(found)


@kernel
def float16(values, out):
    """Fill `out`, uint16, with the bits of half-precision numbers; return how many aren't finite."""
    found = repeat(0, LANES)
    for place in range(0, values.size, LANES):
        found = _as_float16(values, place, out, found)
    return _in_all(found)


@kernel
def not_finite(values):
    """How many float32 are infinite or not a number."""
    found = repeat(0, LANES)
    for place in range(0, values.size, LANES):
        found = _odd_ones(values, place, found)
    return _in_all(found)
