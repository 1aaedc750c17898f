"""Kernels of the types that store each element by itself in 16 bits."""

import numpy as np

from gguf2st.jit import kernel
from gguf2st.vectors import (
    bits_of,
    choose,
    from_bits,
    integers,
    load_halves,
    store,
    widen_half,
    word16,
)

LANES = 16


@kernel
def f16(raw, out):
    """Widen half-precision numbers."""
    whole = out.size // LANES * LANES
    for start in range(0, whole, LANES):
        words = integers(load_halves(raw, 2 * start, LANES))
        magnitudes = (words & 0x7FFF) << 13
        scaled = bits_of(from_bits(magnitudes) * 2.0**112)
        widened = choose(magnitudes < 0x0F800000, scaled, magnitudes | 0x7F800000)
        store(out, start, from_bits(widened | (words & 0x8000) << 16))
    for index in range(whole, out.size):
        out[index] = widen_half(word16(raw, 2 * index))


@kernel
def bf16(raw, out):
    """Put sixteen zero bits below."""
    words = out.view(np.int32)
    whole = out.size // LANES * LANES
    for start in range(0, whole, LANES):
        store(words, start, integers(load_halves(raw, 2 * start, LANES)) << 16)
    for index in range(whole, out.size):
        words[index] = word16(raw, 2 * index) << 16
