"""Kernels of the types whose codes are indices into fixed tables of short vectors.

A vector of magnitudes gets its signs from another table, whose bytes are 0 or -1: where
a sign is -1, `(magnitude ^ sign) - sign` is minus the magnitude.
"""

import numpy as np

from gguf2st.gguf.blocks import grids
from gguf2st.jit import kernel
from gguf2st.vectors import byte, floats, formula, join, load, store, widen_half, word16, word32

# Four or eight int8 for each index
IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S = (
    grids.magnitudes(name).view(np.int8)
    for name in ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
)
EIGHTHS = grids.shifted_eighths().view(np.int8)
# Eight for each byte of signs, and for each seven bits of them
SIGNS = grids.signs(8).view(np.int8) >> 1
SIGNS_OF_SEVEN = grids.signs_of_seven().view(np.int8) >> 1


@formula
def _iq2_xxs(raw, at, out, to):
    d = widen_half(word16(raw, at)) * 0.25
    for group in range(8):
        place = at + 2 + 8 * group
        word = word32(raw, place + 4)
        scale = (0.5 + floats(word >> 28)) * d
        for index in range(4):
            signs = load(SIGNS_OF_SEVEN, 8 * (word & 127), 8)
            values = load(IQ2_XXS, 8 * byte(raw, place + index), 8)
            store(out, to, floats((values ^ signs) - signs) * scale)
            word, to = word >> 7, to + 8


@kernel
def iq2_xxs(raw, out):
    """d * (0.5 + scale) / 4 * sign * table[index]."""
    for block in range(raw.size // 66):
        _iq2_xxs(raw, 66 * block, out, 256 * block)


@formula
def _iq2_xs(raw, at, out, to):
    d = widen_half(word16(raw, at)) * 0.25
    for group in range(16):
        packed = byte(raw, at + 66 + group // 2) >> 4 * (group & 1) & 15
        scale = (0.5 + floats(packed)) * d
        for index in range(2 * group, 2 * group + 2):
            word = word16(raw, at + 2 + 2 * index)
            signs = load(SIGNS_OF_SEVEN, 8 * (word >> 9), 8)
            values = load(IQ2_XS, 8 * (word & 511), 8)
            store(out, to + 8 * index, floats((values ^ signs) - signs) * scale)


@kernel
def iq2_xs(raw, out):
    """d * (0.5 + scale) / 4 * sign * table[index]."""
    for block in range(raw.size // 74):
        _iq2_xs(raw, 74 * block, out, 256 * block)


@formula
def _iq2_s(raw, at, out, to):
    d = widen_half(word16(raw, at)) * 0.25
    for group in range(16):
        packed = byte(raw, at + 74 + group // 2) >> 4 * (group & 1) & 15
        scale = (0.5 + floats(packed)) * d
        for index in range(2 * group, 2 * group + 2):
            high = byte(raw, at + 66 + index // 4) >> 2 * (index & 3) & 3
            signs = load(SIGNS, 8 * byte(raw, at + 34 + index), 8)
            values = load(IQ2_S, 8 * (byte(raw, at + 2 + index) | high << 8), 8)
            store(out, to + 8 * index, floats((values ^ signs) - signs) * scale)


@kernel
def iq2_s(raw, out):
    """d * (0.5 + scale) / 4 * sign * table[index]."""
    for block in range(raw.size // 82):
        _iq2_s(raw, 82 * block, out, 256 * block)


@formula
def _iq3_xxs(raw, at, out, to):
    d = widen_half(word16(raw, at)) * 0.5
    for group in range(8):
        word = word32(raw, at + 66 + 4 * group)
        scale = (0.5 + floats(word >> 28)) * d
        for index in range(8 * group, 8 * group + 8, 2):
            signs = load(SIGNS_OF_SEVEN, 8 * (word & 127), 8)
            first = load(IQ3_XXS, 4 * byte(raw, at + 2 + index), 4)
            second = load(IQ3_XXS, 4 * byte(raw, at + 3 + index), 4)
            values = join(first, second)
            store(out, to + 4 * index, floats((values ^ signs) - signs) * scale)
            word >>= 7


@kernel
def iq3_xxs(raw, out):
    """d * (0.5 + scale) / 2 * sign * table[index]."""
    for block in range(raw.size // 98):
        _iq3_xxs(raw, 98 * block, out, 256 * block)


@formula
def _iq3_s(raw, at, out, to):
    d = widen_half(word16(raw, at))
    for group in range(8):
        packed = byte(raw, at + 106 + group // 2) >> 4 * (group & 1) & 15
        scale = d * floats(1 + 2 * packed)
        high = byte(raw, at + 66 + group)
        for index in range(8 * group, 8 * group + 8, 2):
            signs = load(SIGNS, 8 * byte(raw, at + 74 + index // 2), 8)
            first = byte(raw, at + 2 + index) | (high & 1) << 8
            second = byte(raw, at + 3 + index) | (high & 2) << 7
            values = join(load(IQ3_S, 4 * first, 4), load(IQ3_S, 4 * second, 4))
            store(out, to + 4 * index, floats((values ^ signs) - signs) * scale)
            high >>= 2


@kernel
def iq3_s(raw, out):
    """d * (1 + 2 * scale) * sign * table[index]."""
    for block in range(raw.size // 110):
        _iq3_s(raw, 110 * block, out, 256 * block)


@formula
def _iq1_s(raw, at, out, to):
    d = widen_half(word16(raw, at)) * 0.125
    for group in range(8):
        word = word16(raw, at + 34 + 2 * group)
        scale = d * floats(2 * (word >> 12 & 7) + 1)
        lower = word >> 15 << 11
        for index in range(4 * group, 4 * group + 4):
            entry = byte(raw, at + 2 + index) | (word & 7) << 8 | lower
            store(out, to + 8 * index, floats(load(EIGHTHS, 8 * entry, 8)) * scale)
            word >>= 3


@kernel
def iq1_s(raw, out):
    """d * (1 + 2 * scale) * (table[index] +- 1/8)."""
    for block in range(raw.size // 50):
        _iq1_s(raw, 50 * block, out, 256 * block)


@formula
def _iq1_m(raw, at, out, to):
    d_bits = 0
    for quarter in range(4):
        d_bits |= word16(raw, at + 48 + 2 * quarter) >> 12 << 4 * quarter
    d = widen_half(d_bits) * 0.125
    for group in range(16):
        packed = word16(raw, at + 48 + 2 * (group // 4)) >> 3 * (group & 3) & 7
        scale = floats(2 * packed + 1) * d
        high = byte(raw, at + 32 + group)
        for index in range(2 * group, 2 * group + 2):
            entry = byte(raw, at + index) | (high & 15) << 8
            store(out, to + 8 * index, floats(load(EIGHTHS, 8 * entry, 8)) * scale)
            high >>= 4


@kernel
def iq1_m(raw, out):
    """d * (1 + 2 * scale) * (table[index] +- 1/8)."""
    for block in range(raw.size // 56):
        _iq1_m(raw, 56 * block, out, 256 * block)
