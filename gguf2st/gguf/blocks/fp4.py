"""Blocks of 4-bit floating-point codes under 8-bit floating-point scales.

The code is E2M1: a sign, two bits of exponent, one of mantissa. ggml keeps a
table of doubled values, so that they are integers, and halves the scale; so does
this module, because infinities and the smallest numbers then come out alike.

The formulas are those of `dequantize_row_mxfp4` and `dequantize_row_nvfp4` in
ggml/src/ggml-quants.c.
"""

import numpy as np
import numpy.typing as npt

from gguf2st.gguf.blocks.base import Blocks, BlockType, block_layout
from gguf2st.gguf.blocks.bits import Floats, look_up, look_up_pairs, pair_table, split, write_scaled

_DOUBLED_E2M1 = pair_table([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def _halved_e8m0() -> npt.NDArray[np.float32]:
    """Return 2 ** (byte - 128) for each byte: `ggml_e8m0_to_fp32_half` in ggml-impl.h.

    There, 255 is no special value. The format's specification calls it "not a
    number"; as ggml reads it, it is 2 ** 127.
    """
    powers: npt.NDArray[np.float32] = np.ldexp(np.ones(256, np.float32), np.arange(-128, 128))
    return powers


def _halved_ue4m3() -> npt.NDArray[np.float32]:
    """Return half the E4M3 value of each byte: `ggml_ue4m3_to_fp32` in ggml-impl.h.

    The sign bit is ignored, and 127, "not a number" in the format, means 0.
    """
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    digits = np.where(exponent == 0, mantissa, 8 + mantissa).astype(np.float32)
    halved: npt.NDArray[np.float32] = np.ldexp(digits, np.maximum(exponent, 1) - 11)
    halved[127] = 0
    return halved


HALVED_E8M0 = _halved_e8m0()
HALVED_UE4M3 = _halved_ue4m3()


class MXFP4(BlockType):
    """32 codes E2M1 under a power of two: value = 2 ** (e - 127) * code.

    The low four bits of byte j are element j, the high four bits element j + 16.
    """

    code = 39
    block_size = 32
    layout = block_layout(("e", "u1"), ("qs", "u1", 16))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write 2 ** (e - 127) * code; see `BlockType.decode_into`."""
        codes = split(blocks["qs"], bits=4, width=16)
        scales = look_up(HALVED_E8M0, blocks["e"])[:, None]
        write_scaled(out, look_up_pairs(codes, _DOUBLED_E2M1), scales)


class NVFP4(BlockType):
    """4 groups of 16 codes E2M1: value = d[group] * code, each d an E4M3 number.

    Each group has 8 bytes: the low four bits of byte j are element j, the high
    four bits element j + 8. A model may multiply the whole tensor by one more
    float32, which it stores in a tensor of its own (named `*.scale`).
    """

    code = 40
    block_size = 64
    layout = block_layout(("d", "u1", 4), ("qs", "u1", 32))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d[group] * code; see `BlockType.decode_into`."""
        codes = split(blocks["qs"], bits=4, width=8)
        scales = look_up(HALVED_UE4M3, blocks["d"])
        write_scaled(out, look_up_pairs(codes, _DOUBLED_E2M1), scales)
