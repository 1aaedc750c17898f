"""Scales and offsets of plain rounding, and of a search: formulas for sixteen groups at a time.

Codes are signed here, from -half to half - 1, and a value is (code - offset) * scale;
k stands for code - offset.
"""

from gguf2st.quantize.scale_formulas import fits, stored_scale
from gguf2st.vectors import (
    absolute,
    bits_of,
    choose,
    downward,
    formula,
    from_bits,
    larger,
    nearest,
    smaller,
)

LANES = 16
# A search must beat plain rounding by more than float32 sums can be wrong, so that it is never
# worse, however errors are summed up: the sums of a stretch, and those of 512 stretches.
MARGIN = 1 - 2**-13


@formula
def clipped(values, low, high):
    """Values between two bounds."""
    return smaller(larger(values, low), high)


@formula
def rounded_plainly(low, high, half, symmetric, dtype):
    """Unit and 1 / unit of each group, plain rounding's scale before and after it is stored, its offset.

    They have the numbers of compressed-tensors (`calculate_qparams`): the scale is rounded to
    its dtype after the offset was found with the exact one. The unit is a power of two such that
    the largest magnitude in units lies from 1 to 2; scales are counted in it.
    """
    levels = half + half - 1
    magnitude = larger(-low, high)
    exponent = clipped((bits_of(magnitude) >> 23) - 127, -126, 126)
    unit, inverse_unit = from_bits((127 - exponent) << 23), from_bits((exponent + 127) << 23)
    zeros_only = magnitude == 0
    spread = (high - low) / levels
    scale = choose(symmetric, magnitude / (levels / 2), spread)
    offset = nearest(clipped(-low / spread - half, -half, half - 1))
    offset = choose(zeros_only, 0, choose(symmetric, 0, offset))
    # A group of zeros has scale 1.
    base = choose(zeros_only, unit, scale * unit)
    return unit, inverse_unit, base, stored_scale(base, unit, dtype), offset


@formula
def proposed(low, high, base, factor, half, symmetric):
    """A scale to try, plain rounding's times a factor, and the first k of a window.

    Factor 0 stands for the scale that takes the largest magnitude to code -half.
    """
    # What clipping takes away, it takes from both ends: windows stay in proportion.
    scale = choose(factor == 0, larger(-low, high) / half, base * factor)
    steady = choose(factor == 0, scale, larger(scale, base))
    first = clipped(downward(low / steady), 1 - half - half, -1)
    return scale, choose(symmetric, -half, first)


@formula
def settled(scale, first, unit, best, half, symmetric, dtype):
    """A scale as its dtype holds it, and its offset; the best ones where the dtype can't hold it."""
    # The window from -half + 1 to half is the symmetric one with a negative scale.
    scale = choose(symmetric & (first != -half), -scale, scale)
    offset = choose(symmetric, 0, -(first + half))
    scale = stored_scale(scale, unit, dtype)
    fit = fits(scale, unit, dtype)
    return choose(fit, scale, best[1]), choose(fit, offset, best[2])


@formula
def refined(best, half):
    """Least squares: the best scale for the codes of the best attempt, and their first k."""
    _, scale, offset, xk, kk = best
    scale = choose(kk > 0, xk / kk, scale)
    first = -(offset + half)
    return absolute(scale), choose(scale < 0, first + 1, first)
