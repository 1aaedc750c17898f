"""Kernels of the types whose codes of 4 bits stand for unevenly spaced integers."""

from gguf2st.jit import kernel
from gguf2st.vectors import floats, formula, load, look_up, store, widen_half, word16, word32

# `kvalues_iq4nl` of ggml/src/ggml-common.h
VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@formula
def _iq4_nl(raw, at, out, to):
    d = widen_half(word16(raw, at))
    codes = load(raw, at + 2, 16)
    store(out, to, floats(look_up(codes & 15, VALUES)) * d)
    store(out, to + 16, floats(look_up(codes >> 4, VALUES)) * d)


@kernel
def iq4_nl(raw, out):
    """d * values[code]."""
    for block in range(raw.size // 18):
        _iq4_nl(raw, 18 * block, out, 32 * block)


@formula
def _iq4_xs(raw, at, out, to):
    d, high, low = (
        widen_half(word16(raw, at)),
        word16(raw, at + 2),
        word32(raw, at + 4),
    )
    for group in range(8):
        scale = d * ((low & 15 | (high & 3) << 4) - 32)
        codes = load(raw, at + 8 + 16 * group, 16)
        store(out, to, floats(look_up(codes & 15, VALUES)) * scale)
        store(out, to + 16, floats(look_up(codes >> 4, VALUES)) * scale)
        low, high, to = low >> 4, high >> 2, to + 32


@kernel
def iq4_xs(raw, out):
    """d * (scale - 32) * values[code]."""
    for block in range(raw.size // 136):
        _iq4_xs(raw, 136 * block, out, 256 * block)
