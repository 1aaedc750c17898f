"""Scales as the dtypes in which they are stored can hold them."""

import numpy as np

from gguf2st.vectors import absolute, bits_of, choose, formula, from_bits, nearest

# Dtypes: bits of float32's mantissa that they lack, their smallest number, their largest.
F32 = (0, np.float32(2**-149), np.float32(3.4028235e38))
F16 = (13, np.float32(2**-24), np.float32(65504))
BF16 = (16, np.float32(2**-133), np.float32(3.3895314e38))
DTYPES = {"F32": F32, "F16": F16, "BF16": BF16}


@formula
def stored_scale(scale, unit, dtype):
    """A scale as its dtype holds it; `unit` is the one in which it and the result are counted.

    A scale that would become zero becomes the smallest number of the dtype.
    """
    missing, smallest, _ = dtype
    scale = scale / unit
    words = bits_of(scale)
    below_half = choose(missing > 0, (1 << missing >> 1) - 1, 0)
    odd = choose(missing > 0, words >> missing & 1, 0)
    rounded = from_bits(words + odd + below_half & -(1 << missing))
    # Below the normal numbers of F16, its steps are 2**-24.
    steps = nearest(scale * 2.0**24) * 2.0**-24
    rounded = choose((absolute(scale) < 2.0**-14) & (missing == 13), steps, rounded)
    return choose(rounded == 0, smallest, rounded) * unit


@formula
def fits(scale, unit, dtype):
    """Where a dtype can hold a scale."""
    return absolute(scale) <= unit * dtype[2]
