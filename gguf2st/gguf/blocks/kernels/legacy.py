"""Kernels of the types with 32 to 128 elements under one scale."""

from gguf2st.jit import kernel
from gguf2st.vectors import (
    count_up,
    floats,
    formula,
    integers,
    load,
    repeat,
    signed,
    store,
    widen_half,
    word16,
    word32,
)


@formula
def _q4_0(raw, at, out, to):
    d = widen_half(word16(raw, at))
    codes = load(raw, at + 2, 16)
    store(out, to, (floats(codes & 15) - 8) * d)
    store(out, to + 16, (floats(codes >> 4) - 8) * d)


@kernel
def q4_0(raw, out):
    """d * (code - 8)."""
    for block in range(raw.size // 18):
        _q4_0(raw, 18 * block, out, 32 * block)


@formula
def _q4_1(raw, at, out, to):
    d, m = widen_half(word16(raw, at)), widen_half(word16(raw, at + 2))
    codes = load(raw, at + 4, 16)
    store(out, to, floats(codes & 15) * d + m)
    store(out, to + 16, floats(codes >> 4) * d + m)


@kernel
def q4_1(raw, out):
    """d * code + m."""
    for block in range(raw.size // 20):
        _q4_1(raw, 20 * block, out, 32 * block)


@formula
def _q5_0(raw, at, out, to):
    d, fifths = widen_half(word16(raw, at)), word32(raw, at + 2)
    codes = load(raw, at + 6, 16)
    first = integers(codes & 15) | (repeat(fifths, 16) >> count_up(16) & 1) << 4
    second = integers(codes >> 4) | (repeat(fifths >> 16, 16) >> count_up(16) & 1) << 4
    store(out, to, floats(first - 16) * d)
    store(out, to + 16, floats(second - 16) * d)


@kernel
def q5_0(raw, out):
    """d * (code - 16)."""
    for block in range(raw.size // 22):
        _q5_0(raw, 22 * block, out, 32 * block)


@formula
def _q5_1(raw, at, out, to):
    d, m = widen_half(word16(raw, at)), widen_half(word16(raw, at + 2))
    fifths, codes = word32(raw, at + 4), load(raw, at + 8, 16)
    first = integers(codes & 15) | (repeat(fifths, 16) >> count_up(16) & 1) << 4
    second = integers(codes >> 4) | (repeat(fifths >> 16, 16) >> count_up(16) & 1) << 4
    store(out, to, floats(first) * d + m)
    store(out, to + 16, floats(second) * d + m)


@kernel
def q5_1(raw, out):
    """d * code + m."""
    for block in range(raw.size // 24):
        _q5_1(raw, 24 * block, out, 32 * block)


@formula
def _q8_0(raw, at, out, to):
    d = widen_half(word16(raw, at))
    store(out, to, floats(signed(load(raw, at + 2, 32))) * d)


@kernel
def q8_0(raw, out):
    """d * code."""
    for block in range(raw.size // 34):
        _q8_0(raw, 34 * block, out, 32 * block)


@formula
def _q1_0(raw, at, out, to):
    d = widen_half(word16(raw, at))
    for word in range(4):
        bits = repeat(word32(raw, at + 2 + 4 * word), 32) >> count_up(32) & 1
        store(out, to + 32 * word, floats((bits << 1) - 1) * d)


@kernel
def q1_0(raw, out):
    """+d or -d."""
    for block in range(raw.size // 18):
        _q1_0(raw, 18 * block, out, 128 * block)


@formula
def _q2_0(raw, at, out, to):
    d = widen_half(word16(raw, at))
    for word in range(4):
        packed = repeat(word32(raw, at + 2 + 4 * word), 16)
        codes = packed >> (count_up(16) << 1) & 3
        store(out, to + 16 * word, floats(codes - 1) * d)


@kernel
def q2_0(raw, out):
    """d * (code - 1)."""
    for block in range(raw.size // 18):
        _q2_0(raw, 18 * block, out, 64 * block)
