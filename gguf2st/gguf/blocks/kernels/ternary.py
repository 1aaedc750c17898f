"""Kernels of the types whose elements are minus one, zero or plus one times a scale."""

from gguf2st.jit import kernel
from gguf2st.vectors import floats, formula, integers, load, store, widen_half, word16


@formula
def _tq1_0(raw, at, out, to):
    d = widen_half(word16(raw, at + 52))
    wide, middle, narrow = load(raw, at, 32), load(raw, at + 32, 16), load(raw, at + 48, 4)
    for digit in range(5):
        store(out, to + 32 * digit, floats((integers(wide) * 3 >> 8) - 1) * d)
        store(out, to + 160 + 16 * digit, floats((integers(middle) * 3 >> 8) - 1) * d)
        if digit < 4:
            store(out, to + 240 + 4 * digit, floats((integers(narrow) * 3 >> 8) - 1) * d)
        # In bytes, a product loses the digits in front.
        wide, middle, narrow = wide * 3, middle * 3, narrow * 3


@kernel
def tq1_0(raw, out):
    """d * (digit - 1)."""
    for block in range(raw.size // 54):
        _tq1_0(raw, 54 * block, out, 256 * block)


@formula
def _tq2_0(raw, at, out, to):
    d = widen_half(word16(raw, at + 64))
    for half in range(2):
        codes = load(raw, at + 32 * half, 32)
        for _ in range(4):
            store(out, to, (floats(codes & 3) - 1) * d)
            codes, to = codes >> 2, to + 32


@kernel
def tq2_0(raw, out):
    """d * (code - 1)."""
    for block in range(raw.size // 66):
        _tq2_0(raw, 66 * block, out, 256 * block)
