"""Kernels of the types with 4-bit floating-point codes."""

from gguf2st.gguf.blocks.fp4 import HALVED_E8M0, HALVED_UE4M3
from gguf2st.jit import kernel
from gguf2st.vectors import byte, floats, formula, join, load, look_up, store

DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@formula
def _mxfp4(raw, at, out, to):
    scale = load(HALVED_E8M0, byte(raw, at))
    codes = load(raw, at + 1, 16)
    store(out, to, floats(look_up(codes & 15, DOUBLED_E2M1)) * scale)
    store(out, to + 16, floats(look_up(codes >> 4, DOUBLED_E2M1)) * scale)


@kernel
def mxfp4(raw, out):
    """2 ** (e - 127) * code."""
    for block in range(raw.size // 17):
        _mxfp4(raw, 17 * block, out, 32 * block)


@formula
def _nvfp4(raw, at, out, to):
    for group in range(4):
        codes = load(raw, at + 4 + 8 * group, 8)
        values = floats(look_up(join(codes & 15, codes >> 4), DOUBLED_E2M1))
        store(out, to + 16 * group, values * load(HALVED_UE4M3, byte(raw, at + group)))


@kernel
def nvfp4(raw, out):
    """d[group] * code."""
    for block in range(raw.size // 36):
        _nvfp4(raw, 36 * block, out, 64 * block)
