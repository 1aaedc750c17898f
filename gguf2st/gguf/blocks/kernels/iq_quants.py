"""Kernels of the types whose codes are indices into fixed tables of short vectors.

A vector of magnitudes gets its signs from another table, whose bytes are 0 or -1: where
a sign is -1, `(magnitude ^ sign) - sign` is minus the magnitude.
"""

import numpy as np

from gguf2st.gguf.blocks import grids
from gguf2st.jit import kernel
from gguf2st.vectors import floats, join, load, store, widen_half, word16, word32

# Four or eight int8 for each index
IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S = (
    grids.magnitudes(name).view(np.int8)
    for name in ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
)
EIGHTHS = grids.shifted_eighths().view(np.int8)
# Eight for each byte of signs, and for each seven bits of them
SIGNS = grids.signs(8).view(np.int8) >> 1
SIGNS_OF_SEVEN = grids.signs_of_seven().view(np.int8) >> 1


@kernel
def iq2_xxs(raw, out):
    """d * (0.5 + scale) / 4 * sign * table[index]."""
    half, quarter = np.float32(0.5), np.float32(0.25)
    for block in range(raw.size // 66):
        at, to = 66 * block, 256 * block
        d = widen_half(word16(raw, at)) * quarter
        for group in range(8):
            place = at + 2 + 8 * group
            word = word32(raw, place + 4)
            scale = (half + np.float32(word >> 28)) * d
            for index in range(4):
                signs = load(SIGNS_OF_SEVEN, 8 * (word & 127), 8)
                values = load(IQ2_XXS, 8 * np.int64(raw[place + index]), 8)
                store(out, to, floats((values ^ signs) - signs) * scale)
                word, to = word >> 7, to + 8


@kernel
def iq2_xs(raw, out):
    """d * (0.5 + scale) / 4 * sign * table[index]."""
    half, quarter = np.float32(0.5), np.float32(0.25)
    for block in range(raw.size // 74):
        at, to = 74 * block, 256 * block
        d = widen_half(word16(raw, at)) * quarter
        for group in range(16):
            packed = np.int64(raw[at + 66 + group // 2]) >> 4 * (group & 1) & 15
            scale = (half + np.float32(packed)) * d
            for index in range(2 * group, 2 * group + 2):
                word = word16(raw, at + 2 + 2 * index)
                signs = load(SIGNS_OF_SEVEN, 8 * (word >> 9), 8)
                values = load(IQ2_XS, 8 * (word & 511), 8)
                store(out, to + 8 * index, floats((values ^ signs) - signs) * scale)


@kernel
def iq2_s(raw, out):
    """d * (0.5 + scale) / 4 * sign * table[index]."""
    half, quarter = np.float32(0.5), np.float32(0.25)
    for block in range(raw.size // 82):
        at, to = 82 * block, 256 * block
        d = widen_half(word16(raw, at)) * quarter
        for group in range(16):
            packed = np.int64(raw[at + 74 + group // 2]) >> 4 * (group & 1) & 15
            scale = (half + np.float32(packed)) * d
            for index in range(2 * group, 2 * group + 2):
                high = np.int64(raw[at + 66 + index // 4]) >> 2 * (index & 3) & 3
                signs = load(SIGNS, 8 * np.int64(raw[at + 34 + index]), 8)
                values = load(IQ2_S, 8 * (np.int64(raw[at + 2 + index]) | high << 8), 8)
                store(out, to + 8 * index, floats((values ^ signs) - signs) * scale)


@kernel
def iq3_xxs(raw, out):
    """d * (0.5 + scale) / 2 * sign * table[index]."""
    half = np.float32(0.5)
    for block in range(raw.size // 98):
        at, to = 98 * block, 256 * block
        d = widen_half(word16(raw, at)) * half
        for group in range(8):
            word = word32(raw, at + 66 + 4 * group)
            scale = (half + np.float32(word >> 28)) * d
            for index in range(8 * group, 8 * group + 8, 2):
                signs = load(SIGNS_OF_SEVEN, 8 * (word & 127), 8)
                first = load(IQ3_XXS, 4 * np.int64(raw[at + 2 + index]), 4)
                second = load(IQ3_XXS, 4 * np.int64(raw[at + 3 + index]), 4)
                values = join(first, second)
                store(out, to + 4 * index, floats((values ^ signs) - signs) * scale)
                word >>= 7


@kernel
def iq3_s(raw, out):
    """d * (1 + 2 * scale) * sign * table[index]."""
    for block in range(raw.size // 110):
        at, to = 110 * block, 256 * block
        d = widen_half(word16(raw, at))
        for group in range(8):
            packed = np.int64(raw[at + 106 + group // 2]) >> 4 * (group & 1) & 15
            scale = d * np.float32(1 + 2 * packed)
            high = np.int64(raw[at + 66 + group])
            for index in range(8 * group, 8 * group + 8, 2):
                signs = load(SIGNS, 8 * np.int64(raw[at + 74 + index // 2]), 8)
                first = np.int64(raw[at + 2 + index]) | (high & 1) << 8
                second = np.int64(raw[at + 3 + index]) | (high & 2) << 7
                values = join(load(IQ3_S, 4 * first, 4), load(IQ3_S, 4 * second, 4))
                store(out, to + 4 * index, floats((values ^ signs) - signs) * scale)
                high >>= 2


@kernel
def iq1_s(raw, out):
    """d * (1 + 2 * scale) * (table[index] +- 1/8)."""
    eighth = np.float32(0.125)
    for block in range(raw.size // 50):
        at, to = 50 * block, 256 * block
        d = widen_half(word16(raw, at)) * eighth
        for group in range(8):
            word = word16(raw, at + 34 + 2 * group)
            scale = d * np.float32(2 * (word >> 12 & 7) + 1)
            lower = word >> 15 << 11
            for index in range(4 * group, 4 * group + 4):
                entry = np.int64(raw[at + 2 + index]) | (word & 7) << 8 | lower
                store(out, to + 8 * index, floats(load(EIGHTHS, 8 * entry, 8)) * scale)
                word >>= 3


@kernel
def iq1_m(raw, out):
    """d * (1 + 2 * scale) * (table[index] +- 1/8)."""
    eighth = np.float32(0.125)
    for block in range(raw.size // 56):
        at, to = 56 * block, 256 * block
        d_bits = np.int64(0)
        for quarter in range(4):
            d_bits |= word16(raw, at + 48 + 2 * quarter) >> 12 << 4 * quarter
        d = widen_half(d_bits) * eighth
        for group in range(16):
            packed = word16(raw, at + 48 + 2 * (group // 4)) >> 3 * (group & 3) & 7
            scale = np.float32(2 * packed + 1) * d
            high = np.int64(raw[at + 32 + group])
            for index in range(2 * group, 2 * group + 2):
                entry = np.int64(raw[at + index]) | (high & 15) << 8
                store(out, to + 8 * index, floats(load(EIGHTHS, 8 * entry, 8)) * scale)
                high >>= 4
