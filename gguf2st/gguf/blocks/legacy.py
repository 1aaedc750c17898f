# ruff: noqa: N801 (the classes bear the names that ggml and its files use)
"""Blocks of 32 to 128 elements under one scale: the oldest formats and their kin.

The formulas are those of `dequantize_row_*` in ggml/src/ggml-quants.c.
"""

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import signed
from gguf2st.gguf.blocks.base import Blocks, BlockType, block_layout
from gguf2st.gguf.blocks.bits import (
    Bytes,
    Floats,
    bytes_of,
    look_up,
    single_bits,
    split,
    widen,
    write_scaled,
)


class Q4_0(BlockType):
    """32 codes of 4 bits: value = d * (code - 8).

    The low four bits of byte j are element j, the high four bits element j + 16.
    """

    code = 2
    block_size = 32
    layout = block_layout(("d", "<f2"), ("qs", "u1", 16))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (code - 8); see `BlockType.decode_into`."""
        codes = signed(split(blocks["qs"], bits=4, width=16))
        codes -= 8
        write_scaled(out, codes, widen(blocks["d"]))


class Q4_1(BlockType):
    """32 codes of 4 bits: value = d * code + m. Codes lie as in Q4_0."""

    code = 3
    block_size = 32
    layout = block_layout(("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * code + m; see `BlockType.decode_into`."""
        write_scaled(out, split(blocks["qs"], bits=4, width=16), widen(blocks["d"]))
        out += widen(blocks["m"])


def _five_bit_codes(blocks: Blocks) -> Bytes:
    """Return the codes of Q5_0 and Q5_1, uint8 (n, 32) below 32."""
    codes = split(blocks["qs"], bits=4, width=16)
    high = single_bits(bytes_of(blocks["qh"]))
    high <<= 4
    codes |= high
    return codes


class Q5_0(BlockType):
    """32 codes of 5 bits: value = d * (code - 16).

    The low four bits lie as in Q4_0; bit j of `qh` is the fifth bit of element j.
    """

    code = 6
    block_size = 32
    layout = block_layout(("d", "<f2"), ("qh", "<u4"), ("qs", "u1", 16))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (code - 16); see `BlockType.decode_into`."""
        codes = signed(_five_bit_codes(blocks))
        codes -= 16
        write_scaled(out, codes, widen(blocks["d"]))


class Q5_1(BlockType):
    """32 codes of 5 bits: value = d * code + m. Codes lie as in Q5_0."""

    code = 7
    block_size = 32
    layout = block_layout(("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * code + m; see `BlockType.decode_into`."""
        write_scaled(out, _five_bit_codes(blocks), widen(blocks["d"]))
        out += widen(blocks["m"])


class Q8_0(BlockType):
    """32 signed codes of 8 bits: value = d * code."""

    code = 8
    block_size = 32
    layout = block_layout(("d", "<f2"), ("qs", "i1", 32))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * code; see `BlockType.decode_into`."""
        write_scaled(out, blocks["qs"], widen(blocks["d"]))


class Q1_0(BlockType):
    """128 codes of 1 bit: value = +d where the bit is set, otherwise -d.

    Bit i of byte j is element 8 * j + i.
    """

    code = 41
    block_size = 128
    layout = block_layout(("d", "<f2"), ("qs", "u1", 16))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write +d or -d; see `BlockType.decode_into`."""
        signs = signed(single_bits(blocks["qs"]))
        signs <<= 1
        signs -= 1
        write_scaled(out, signs, widen(blocks["d"]))


def _spread_two_bit_codes() -> npt.NDArray[np.uint32]:
    """Return for each byte its four codes less 1, as four int8 in one uint32."""
    codes = (np.arange(256)[:, None] >> np.arange(0, 8, 2)) & 3
    return (codes - 1).astype(np.int8).view(np.uint32)[:, 0]


_FOUR_CODES = _spread_two_bit_codes()


class Q2_0(BlockType):
    """64 codes of 2 bits: value = d * (code - 1), that is -d, 0, +d or +2d.

    Bits 2 * i and 2 * i + 1 of byte j are element 4 * j + i.
    """

    code = 42
    block_size = 64
    layout = block_layout(("d", "<f2"), ("qs", "u1", 16))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (code - 1); see `BlockType.decode_into`."""
        codes = signed(look_up(_FOUR_CODES, blocks["qs"]))
        write_scaled(out, codes, widen(blocks["d"]))
