# ruff: noqa: N801 (the classes bear the names that ggml and its files use)
"""IQ4 blocks: each code of 4 bits stands for one of 16 unevenly spaced integers.

The formulas are those of `dequantize_row_iq4_*` in ggml/src/ggml-quants.c, the
integers those of `kvalues_iq4nl` in ggml/src/ggml-common.h.
"""

from gguf2st.arrays import signed
from gguf2st.gguf.blocks.base import Blocks, BlockType, block_layout
from gguf2st.gguf.blocks.bits import (
    Floats,
    integers,
    look_up_pairs,
    narrow,
    pair_table,
    split,
    split_integers,
    split_pairs,
    widen,
    write_scaled,
)

_VALUES = pair_table([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


class IQ4_NL(BlockType):
    """32 codes of 4 bits: value = d * values[code].

    The low four bits of byte j are element j, the high four bits element j + 16.
    """

    code = 20
    block_size = 32
    layout = block_layout(("d", "<f2"), ("qs", "u1", 16))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * values[code]; see `BlockType.decode_into`."""
        codes = split(blocks["qs"], bits=4, width=16)
        write_scaled(out, look_up_pairs(codes, _VALUES), widen(blocks["d"]))


class IQ4_XS(BlockType):
    """8 groups of 32 codes of 4 bits: value = d * (scale - 32) * values[code].

    Each group has 16 bytes of `qs`, laid out as in IQ4_NL. The scales have 6 bits:
    half-byte g of `scales_l` (the low half first) is the low four bits of group
    g, bits 2 * g and 2 * g + 1 of `scales_h` are its high two bits.
    """

    code = 23
    block_size = 256
    layout = block_layout(
        ("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)
    )

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (scale - 32) * values[code]; see `BlockType.decode_into`."""
        scales = narrow(split_integers(integers(blocks["scales_h"]), bits=2, count=8)) << 4
        scales |= split_pairs(blocks["scales_l"])
        group_scales = widen(blocks["d"]) * (signed(scales) - 32)
        codes = split(blocks["qs"], bits=4, width=16)
        write_scaled(out, look_up_pairs(codes, _VALUES), group_scales)
