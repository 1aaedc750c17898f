"""Kernels of the types with 256 elements whose groups have small integer scales of their own."""

from gguf2st.jit import kernel
from gguf2st.vectors import floats, formula, join, lane, load, signed, store, widen_half, word16


@formula
def _q2_k(raw, at, out, to):
    packed = load(raw, at, 16)
    scales = floats(packed & 15) * widen_half(word16(raw, at + 80))
    minima = floats(packed >> 4) * widen_half(word16(raw, at + 82))
    for half in range(2):
        codes = load(raw, at + 16 + 32 * half, 16)
        others = load(raw, at + 32 + 32 * half, 16)
        for group in range(8 * half, 8 * half + 8, 2):
            store(out, to, floats(codes & 3) * lane(scales, group) - lane(minima, group))
            scale, minimum = lane(scales, group + 1), lane(minima, group + 1)
            store(out, to + 16, floats(others & 3) * scale - minimum)
            codes, others, to = codes >> 2, others >> 2, to + 32


@kernel
def q2_k(raw, out):
    """d * scale * code - dmin * minimum."""
    for block in range(raw.size // 84):
        _q2_k(raw, 84 * block, out, 256 * block)


@formula
def _q3_k(raw, at, out, to):
    low, high = load(raw, at + 96, 8), load(raw, at + 104, 4)
    high = join(join(high & 3, high >> 2 & 3), join(high >> 4 & 3, high >> 6))
    scales = (floats(join(low & 15, low >> 4) | high << 4) - 32) * widen_half(word16(raw, at + 108))
    thirds, other_thirds = load(raw, at, 16), load(raw, at + 16, 16)
    for half in range(2):
        codes = load(raw, at + 32 + 32 * half, 16)
        others = load(raw, at + 48 + 32 * half, 16)
        for group in range(8 * half, 8 * half + 8, 2):
            signed_codes = floats(codes & 3 | (thirds & 1) << 2) - 4
            store(out, to, signed_codes * lane(scales, group))
            signed_codes = floats(others & 3 | (other_thirds & 1) << 2) - 4
            store(out, to + 16, signed_codes * lane(scales, group + 1))
            codes, others, to = codes >> 2, others >> 2, to + 32
            thirds, other_thirds = thirds >> 1, other_thirds >> 1


@kernel
def q3_k(raw, out):
    """d * (scale - 32) * (code - 4)."""
    for block in range(raw.size // 110):
        _q3_k(raw, 110 * block, out, 256 * block)


def _scales_and_minima(raw, at):
    """Those of the eight groups of Q4_K and Q5_K: 6 bits each, whose highest two lie apart."""
    first, second, last = load(raw, at + 4, 4), load(raw, at + 8, 4), load(raw, at + 12, 4)
    scales = floats(join(first & 63, last & 15 | first >> 6 << 4))
    minima = floats(join(second & 63, last >> 4 | second >> 6 << 4))
    return scales * widen_half(word16(raw, at)), minima * widen_half(word16(raw, at + 2))


@formula
def _q4_k(raw, at, out, to):
    scales, minima = _scales_and_minima(raw, at)
    for group in range(0, 8, 2):
        codes = load(raw, at + 16 + 16 * group, 32)
        store(out, to, floats(codes & 15) * lane(scales, group) - lane(minima, group))
        scale, minimum = lane(scales, group + 1), lane(minima, group + 1)
        store(out, to + 32, floats(codes >> 4) * scale - minimum)
        to += 64


@kernel
def q4_k(raw, out):
    """d * scale * code - dmin * minimum."""
    for block in range(raw.size // 144):
        _q4_k(raw, 144 * block, out, 256 * block)


@formula
def _q5_k(raw, at, out, to):
    scales, minima = _scales_and_minima(raw, at)
    fifths = load(raw, at + 16, 32)
    for group in range(0, 8, 2):
        codes = load(raw, at + 48 + 16 * group, 32)
        low = floats(codes & 15 | (fifths & 1) << 4)
        store(out, to, low * lane(scales, group) - lane(minima, group))
        high = floats(codes >> 4 | (fifths & 2) << 3)
        store(out, to + 32, high * lane(scales, group + 1) - lane(minima, group + 1))
        fifths, to = fifths >> 2, to + 64


@kernel
def q5_k(raw, out):
    """d * scale * code - dmin * minimum."""
    for block in range(raw.size // 176):
        _q5_k(raw, 176 * block, out, 256 * block)


@formula
def _q6_k(raw, at, out, to):
    scales = floats(signed(load(raw, at + 192, 16))) * widen_half(word16(raw, at + 208))
    for half in range(2):
        for side in range(2):
            first = load(raw, at + 64 * half + 16 * side, 16)
            second = load(raw, at + 64 * half + 32 + 16 * side, 16)
            high = load(raw, at + 128 + 32 * half + 16 * side, 16)
            group, place = 8 * half + side, to + 128 * half + 16 * side
            codes = floats(first & 15 | (high & 3) << 4) - 32
            store(out, place, codes * lane(scales, group))
            codes = floats(second & 15 | (high & 12) << 2) - 32
            store(out, place + 32, codes * lane(scales, group + 2))
            codes = floats(first >> 4 | high & 48) - 32
            store(out, place + 64, codes * lane(scales, group + 4))
            codes = floats(second >> 4 | (high & 192) >> 2) - 32
            store(out, place + 96, codes * lane(scales, group + 6))


@kernel
def q6_k(raw, out):
    """d * scale * (code - 32)."""
    for block in range(raw.size // 210):
        _q6_k(raw, 210 * block, out, 256 * block)
