"""Kernels of the types with 32 to 128 elements under one scale."""

from gguf2st.jit import kernel
from gguf2st.vectors import (
    count_up,
    floats,
    integers,
    load,
    repeat,
    signed,
    store,
    widen_half,
    word16,
    word32,
)


@kernel
def q4_0(raw, out):
    """d * (code - 8)."""
    for block in range(raw.size // 18):
        at, to = 18 * block, 32 * block
        d = widen_half(word16(raw, at))
        codes = load(raw, at + 2, 16)
        store(out, to, (floats(codes & 15) - 8) * d)
        store(out, to + 16, (floats(codes >> 4) - 8) * d)


@kernel
def q4_1(raw, out):
    """d * code + m."""
    for block in range(raw.size // 20):
        at, to = 20 * block, 32 * block
        d, m = widen_half(word16(raw, at)), widen_half(word16(raw, at + 2))
        codes = load(raw, at + 4, 16)
        store(out, to, floats(codes & 15) * d + m)
        store(out, to + 16, floats(codes >> 4) * d + m)


@kernel
def q5_0(raw, out):
    """d * (code - 16)."""
    for block in range(raw.size // 22):
        at, to = 22 * block, 32 * block
        d, fifths = widen_half(word16(raw, at)), word32(raw, at + 2)
        codes = load(raw, at + 6, 16)
        first = integers(codes & 15) | (repeat(fifths, 16) >> count_up(16) & 1) << 4
        second = integers(codes >> 4) | (repeat(fifths >> 16, 16) >> count_up(16) & 1) << 4
        store(out, to, floats(first - 16) * d)
        store(out, to + 16, floats(second - 16) * d)


@kernel
def q5_1(raw, out):
    """d * code + m."""
    for block in range(raw.size // 24):
        at, to = 24 * block, 32 * block
        d, m = widen_half(word16(raw, at)), widen_half(word16(raw, at + 2))
        fifths, codes = word32(raw, at + 4), load(raw, at + 8, 16)
        first = integers(codes & 15) | (repeat(fifths, 16) >> count_up(16) & 1) << 4
        second = integers(codes >> 4) | (repeat(fifths >> 16, 16) >> count_up(16) & 1) << 4
        store(out, to, floats(first) * d + m)
        store(out, to + 16, floats(second) * d + m)


@kernel
def q8_0(raw, out):
    """d * code."""
    for block in range(raw.size // 34):
        d = widen_half(word16(raw, 34 * block))
        store(out, 32 * block, floats(signed(load(raw, 34 * block + 2, 32))) * d)


@kernel
def q1_0(raw, out):
    """+d or -d."""
    for block in range(raw.size // 18):
        d = widen_half(word16(raw, 18 * block))
        for word in range(4):
            bits = repeat(word32(raw, 18 * block + 2 + 4 * word), 32) >> count_up(32) & 1
            store(out, 128 * block + 32 * word, floats((bits << 1) - 1) * d)


@kernel
def q2_0(raw, out):
    """d * (code - 1)."""
    for block in range(raw.size // 18):
        d = widen_half(word16(raw, 18 * block))
        for word in range(4):
            packed = repeat(word32(raw, 18 * block + 2 + 4 * word), 16)
            codes = packed >> (count_up(16) << 1) & 3
            store(out, 64 * block + 16 * word, floats(codes - 1) * d)
