# ruff: noqa: N801 (the classes bear the names that ggml and its files use)
"""IQ blocks whose codes are indices into fixed tables of short vectors.

The tables are in `grids.py`. The formulas are those of `dequantize_row_iq*` in
ggml/src/ggml-quants.c.
"""

from gguf2st.arrays import Array, signed
from gguf2st.gguf.blocks import grids
from gguf2st.gguf.blocks.base import Blocks, BlockType, block_layout
from gguf2st.gguf.blocks.bits import (
    Floats,
    half_more,
    halves,
    indices,
    integers,
    look_up,
    single_bits,
    split_integers,
    split_pairs,
    widen,
    write_scaled,
)


def _multiplied(magnitudes: Array, signs: Array) -> Array:
    """Multiply looked-up vectors (n, ...) by looked-up signs, to int8 (n, 256)."""
    values = signed(magnitudes.reshape(len(magnitudes), -1))
    values *= signed(signs.reshape(len(signs), -1))
    return values


def _signs_and_scales(words: Array) -> tuple[Array, Array]:
    """Take apart the words of IQ2_XXS and IQ3_XXS.

    Args:
        words: integers of 32 bits (n, 8), one for each group of 32 elements: four times
            seven bits of signs from the lowest bit up, then four bits of scale.

    Returns:
        The signs (n, 8, 4) for eight elements each, and the scales, integers (n, 8).
    """
    seven_bits = split_integers(words, bits=7, count=4)
    return look_up(grids.signs_of_seven(), seven_bits), words >> 28


class IQ2_XXS(BlockType):
    """8 groups of 32 elements: value = d * (0.5 + scale) / 4 * sign * table[index].

    A group has four indices of 8 bits, each for eight elements, and one integer of
    32 bits: from the lowest bit four times seven bits of signs, then the scale.

    ggml declares the block as `uint16_t qs[32]`, but reads the indices as bytes
    and the rest as an integer of 32 bits, which decides what a big-endian machine
    sees; hence this layout.
    """

    code = 16
    block_size = 256
    layout = block_layout(("d", "<f2"), ("qs", [("index", "u1", 4), ("signs_scale", "<u4")], 8))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (0.5 + scale) / 4 * sign * table[index]; see `BlockType.decode_into`."""
        groups = blocks["qs"]
        signs, scales = _signs_and_scales(integers(groups["signs_scale"]))
        magnitudes = look_up(grids.magnitudes("iq2_xxs"), groups["index"])
        group_scales = (widen(blocks["d"]) * 0.25) * half_more(scales)
        write_scaled(out, _multiplied(magnitudes, signs), group_scales)


class IQ2_XS(BlockType):
    """16 groups of 16 elements: value = d * (0.5 + scale) / 4 * sign * table[index].

    Each integer of `qs` stands for eight elements: 9 bits of index, 7 bits of
    signs. Byte j of `scales` has the scale of group 2 * j in its low four bits and
    that of group 2 * j + 1 in its high four bits.
    """

    code = 17
    block_size = 256
    layout = block_layout(("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (0.5 + scale) / 4 * sign * table[index]; see `BlockType.decode_into`."""
        words = integers(blocks["qs"])
        magnitudes = look_up(grids.magnitudes("iq2_xs"), words & 511)
        signs = look_up(grids.signs_of_seven(), words >> 9)
        group_scales = (widen(blocks["d"]) * 0.25) * half_more(split_pairs(blocks["scales"]))
        write_scaled(out, _multiplied(magnitudes, signs), group_scales)


class IQ2_S(BlockType):
    """16 groups of 16 elements: value = d * (0.5 + scale) / 4 * sign * table[index].

    Byte j of `qs` has the low 8 bits of the index for the eight elements from
    8 * j, byte j of `signs` their signs; bits 2 * i and 2 * i + 1 of byte j of
    `qh` are the high two bits of index 4 * j + i. Scales lie as in IQ2_XS.
    """

    code = 22
    block_size = 256
    layout = block_layout(
        ("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)
    )

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (0.5 + scale) / 4 * sign * table[index]; see `BlockType.decode_into`."""
        high = split_integers(blocks["qh"], bits=2, count=4)
        index = indices(high.reshape(-1, 32)) << 8
        index |= blocks["qs"]
        magnitudes = look_up(grids.magnitudes("iq2_s"), index)
        signs = look_up(grids.signs(8), blocks["signs"])
        group_scales = (widen(blocks["d"]) * 0.25) * half_more(split_pairs(blocks["scales"]))
        write_scaled(out, _multiplied(magnitudes, signs), group_scales)


class IQ3_XXS(BlockType):
    """8 groups of 32 elements: value = d * (0.5 + scale) / 2 * sign * table[index].

    Byte j of `qs` is the index for the four elements from 4 * j. Signs and scales
    lie in integers of 32 bits, one for each group, as in IQ2_XXS.
    """

    code = 18
    block_size = 256
    layout = block_layout(("d", "<f2"), ("qs", "u1", 64), ("scales_and_signs", "<u4", 8))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (0.5 + scale) / 2 * sign * table[index]; see `BlockType.decode_into`."""
        signs, scales = _signs_and_scales(integers(blocks["scales_and_signs"]))
        magnitudes = look_up(grids.magnitudes("iq3_xxs"), blocks["qs"])
        group_scales = (widen(blocks["d"]) * 0.5) * half_more(scales)
        write_scaled(out, _multiplied(magnitudes, signs), group_scales)


class IQ3_S(BlockType):
    """8 groups of 32 elements: value = d * (1 + 2 * scale) * sign * table[index].

    Byte j of `qs` has the low 8 bits of the index for the four elements from
    4 * j; bit i of byte j of `qh` is the ninth bit of index 8 * j + i; bit i of
    byte j of `signs` is the sign of element 8 * j + i. Scales lie as in IQ2_XS.
    """

    code = 21
    block_size = 256
    layout = block_layout(
        ("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)
    )

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (1 + 2 * scale) * sign * table[index]; see `BlockType.decode_into`."""
        index = indices(single_bits(blocks["qh"])) << 8
        index |= blocks["qs"]
        magnitudes = look_up(grids.magnitudes("iq3_s"), index)
        signs = look_up(grids.signs(8), blocks["signs"])
        group_scales = widen(blocks["d"]) * (1 + 2 * split_pairs(blocks["scales"]))
        write_scaled(out, _multiplied(magnitudes, signs), group_scales)


class IQ1_S(BlockType):
    """8 groups of 32 elements: value = d * (1 + 2 * scale) * (table[index] +- 1/8).

    Byte j of `qs` has the low 8 bits of the index for the eight elements from
    8 * j. Each integer of `qh` belongs to a group: four times three high bits of
    an index from the lowest bit up, three bits of scale, and the bit that makes
    the eighth negative.
    """

    code = 19
    block_size = 256
    layout = block_layout(("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (1 + 2 * scale) * (table[index] +- 1/8); see `BlockType.decode_into`."""
        words = integers(blocks["qh"])
        index = split_integers(words, bits=3, count=4)
        index |= ((words >> 12) & 8)[:, :, None]
        index <<= 8
        index = index.reshape(-1, 32)
        index |= blocks["qs"]
        eighths = signed(look_up(grids.shifted_eighths(), index))
        odd = 2 * ((words >> 12) & 7) + 1
        write_scaled(out, eighths, (widen(blocks["d"]) * 0.125) * odd)


class IQ1_M(BlockType):
    """16 groups of 16 elements: value = d * (1 + 2 * scale) * (table[index] +- 1/8).

    Byte j of `qs` has the low 8 bits of the index for the eight elements from
    8 * j, and half-byte j of `qh` (the low half first) its high three bits and the
    bit that makes the eighth negative. `scales` are four integers: each has the
    three bits of four group scales from the lowest bit up, and its top four bits
    are a quarter of the half-precision number d, the lowest quarter first.
    """

    code = 29
    block_size = 256
    layout = block_layout(("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (1 + 2 * scale) * (table[index] +- 1/8); see `BlockType.decode_into`."""
        index = indices(split_pairs(blocks["qh"])) << 8
        index |= blocks["qs"]
        eighths = signed(look_up(grids.shifted_eighths(), index))

        words = integers(blocks["scales"])
        top = words >> 12
        d = halves(top[:, 0] | top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12)
        odd = 2 * split_integers(words, bits=3, count=4) + 1
        write_scaled(out, eighths, (widen(d) * 0.125) * odd.reshape(-1, 16))
