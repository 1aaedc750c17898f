# ruff: noqa: N801 (the classes bear the names that ggml and its files use)
"""Blocks of 256 elements whose groups have small integer scales of their own.

A group's scale is the block's half-precision `d` times the group's integer.
The formulas are those of `dequantize_row_*_K` in ggml/src/ggml-quants.c.
"""

from gguf2st.arrays import signed
from gguf2st.gguf.blocks.base import Blocks, BlockType, block_layout
from gguf2st.gguf.blocks.bits import Bytes, Floats, join, split, widen, write_scaled


class Q2_K(BlockType):
    """16 groups of 16 codes of 2 bits: value = d * scale * code - dmin * minimum.

    Byte g of `scales` has the scale of group g in its low four bits and the
    minimum in its high four bits. Each half of the block has 32 bytes of `qs`:
    bits 2 * i and 2 * i + 1 of byte j are element 32 * i + j of that half.
    """

    code = 10
    block_size = 256
    layout = block_layout(("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2"))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * scale * code - dmin * minimum; see `BlockType.decode_into`."""
        packed = blocks["scales"]
        scales = widen(blocks["d"]) * (packed & 15)
        minima = widen(blocks["dmin"]) * (packed >> 4)
        write_scaled(out, split(blocks["qs"], bits=2, width=32), scales, minima)


class Q3_K(BlockType):
    """16 groups of 16 codes of 3 bits: value = d * (scale - 32) * (code - 4).

    The low two bits of the codes lie as in Q2_K; bit i of byte j of `hmask` is
    the third bit of element 32 * i + j. The scales have 6 bits: of the first 8
    bytes of `scales` the low four bits belong to groups 0 to 7 and the high four
    bits to groups 8 to 15; bits 2 * i and 2 * i + 1 of byte 8 + j are the high
    two bits of group 4 * i + j.
    """

    code = 11
    block_size = 256
    layout = block_layout(("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2"))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (scale - 32) * (code - 4); see `BlockType.decode_into`."""
        codes = split(blocks["hmask"], bits=1, width=32)
        codes <<= 2
        codes |= split(blocks["qs"], bits=2, width=32)
        codes = signed(codes)
        codes -= 4

        packed = blocks["scales"]
        scales = split(packed[:, :8], bits=4, width=8)
        scales |= split(packed[:, 8:], bits=2, width=4) << 4
        write_scaled(out, codes, widen(blocks["d"]) * (signed(scales) - 32))


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the 6-bit integers of Q4_K and Q5_K: `get_scale_min_k4` in ggml-quants.c.

    Bytes 0 to 3 have the scales of groups 0 to 3 in their low six bits, bytes 4
    to 7 the minima of these groups. For groups 4 to 7, bytes 8 to 11 hold the
    low four bits of scale (low half) and minimum (high half), and the top two
    bits of bytes 0 to 7 hold the rest.

    Args:
        packed: uint8 (n, 12).

    Returns:
        The scales and the minima of the eight groups, uint8 (n, 8) below 64.
    """
    first, last = packed[:, :8], packed[:, 8:]
    high = (first >> 6) << 4
    low = first & 63
    scales = join([low[:, :4], (last & 15) | high[:, :4]])
    minima = join([low[:, 4:], (last >> 4) | high[:, 4:]])
    return scales, minima


class Q4_K(BlockType):
    """8 groups of 32 codes of 4 bits: value = d * scale * code - dmin * minimum.

    Each two groups have 32 bytes of `qs`: the low four bits of byte j are element
    j of the first group, the high four bits element j of the second. `scales`
    holds a scale and a minimum of 6 bits for each group (`_scales_and_minima`).
    """

    code = 12
    block_size = 256
    layout = block_layout(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * scale * code - dmin * minimum; see `BlockType.decode_into`."""
        scales, minima = _scales_and_minima(blocks["scales"])
        codes = split(blocks["qs"], bits=4, width=32)
        write_scaled(out, codes, widen(blocks["d"]) * scales, widen(blocks["dmin"]) * minima)


class Q5_K(BlockType):
    """8 groups of 32 codes of 5 bits: value = d * scale * code - dmin * minimum.

    As Q4_K; bit g of byte j of `qh` is the fifth bit of element j of group g.
    """

    code = 13
    block_size = 256
    layout = block_layout(
        ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)
    )

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * scale * code - dmin * minimum; see `BlockType.decode_into`."""
        scales, minima = _scales_and_minima(blocks["scales"])
        codes = split(blocks["qh"], bits=1, width=32)
        codes <<= 4
        codes |= split(blocks["qs"], bits=4, width=32)
        write_scaled(out, codes, widen(blocks["d"]) * scales, widen(blocks["dmin"]) * minima)


class Q6_K(BlockType):
    """16 groups of 16 codes of 6 bits: value = d * scale * (code - 32).

    Each half of the block has 64 bytes of `ql` and 32 of `qh`: the low four bits
    of byte j of `ql` belong to element j of that half and the high four bits to
    element 64 + j; bits 2 * i and 2 * i + 1 of byte j of `qh` are the high two
    bits of element 32 * i + j. The scales are signed integers of 8 bits.
    """

    code = 14
    block_size = 256
    layout = block_layout(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2"))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * scale * (code - 32); see `BlockType.decode_into`."""
        codes = split(blocks["qh"], bits=2, width=32)
        codes <<= 4
        codes |= split(blocks["ql"], bits=4, width=64)
        codes = signed(codes)
        codes -= 32
        write_scaled(out, codes, widen(blocks["d"]) * blocks["scales"])
