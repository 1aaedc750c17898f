# ruff: noqa: N801 (the classes bear the names that ggml and its files use)
"""IQ blocks whose codes are indices into fixed tables of short vectors.

The tables are in `grids.py`. The formulas are those of `dequantize_row_iq*` in
ggml/src/ggml-quants.c.
"""

import numpy as np
import numpy.typing as npt

from gguf2st.gguf.blocks import grids
from gguf2st.gguf.blocks.base import BlockType, block_layout
from gguf2st.gguf.blocks.bits import Floats, single_bits, split_pairs, widen, write_scaled

_SEVEN_BITS_EACH = np.array([0, 7, 14, 21], np.uint32)
_TWO_BITS_EACH = np.array([0, 2, 4, 6], np.uint8)
_THREE_BITS_EACH = np.array([0, 3, 6, 9], np.uint16)


def _signed(
    magnitudes: npt.NDArray[np.unsignedinteger], signs: npt.NDArray[np.unsignedinteger]
) -> npt.NDArray[np.int8]:
    """Multiply looked-up vectors (n, ...) by looked-up signs, to int8 (n, 256)."""
    values = magnitudes.reshape(len(magnitudes), -1).view(np.int8)
    values *= signs.reshape(len(signs), -1).view(np.int8)
    return values


def _signs_and_scales(
    words: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.unsignedinteger], Floats]:
    """Take apart the words of IQ2_XXS and IQ3_XXS.

    Args:
        words: uint32 (n, 8), one for each group of 32 elements: four times seven
            bits of signs from the lowest bit up, then four bits of scale.

    Returns:
        The signs (n, 8, 4) for eight elements each, and 0.5 + scale, float32 (n, 8).
    """
    seven_bits = (words[:, :, None] >> _SEVEN_BITS_EACH) & np.uint32(127)
    scales = (words >> np.uint32(28)).astype(np.float32)
    scales += np.float32(0.5)
    return grids.signs_of_seven().take(seven_bits, mode="clip"), scales


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

    def decode_into(self, blocks: npt.NDArray[np.void], out: Floats) -> None:
        """Write d * (0.5 + scale) / 4 * sign * table[index]; see `BlockType.decode_into`."""
        groups = blocks["qs"]
        signs, scales = _signs_and_scales(groups["signs_scale"].astype(np.uint32))
        magnitudes = grids.magnitudes("iq2_xxs").take(groups["index"], mode="clip")
        scales *= widen(blocks["d"]) * np.float32(0.25)
        write_scaled(out, _signed(magnitudes, signs), scales)


class IQ2_XS(BlockType):
    """16 groups of 16 elements: value = d * (0.5 + scale) / 4 * sign * table[index].

    Each integer of `qs` stands for eight elements: 9 bits of index, 7 bits of
    signs. Byte j of `scales` has the scale of group 2 * j in its low four bits and
    that of group 2 * j + 1 in its high four bits.
    """

    code = 17
    block_size = 256
    layout = block_layout(("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8))

    def decode_into(self, blocks: npt.NDArray[np.void], out: Floats) -> None:
        """Write d * (0.5 + scale) / 4 * sign * table[index]; see `BlockType.decode_into`."""
        words = blocks["qs"].astype(np.uint16)
        magnitudes = grids.magnitudes("iq2_xs").take(words & np.uint16(511), mode="clip")
        signs = grids.signs_of_seven().take(words >> np.uint16(9), mode="clip")
        scales = split_pairs(blocks["scales"]) + np.float32(0.5)
        scales *= widen(blocks["d"]) * np.float32(0.25)
        write_scaled(out, _signed(magnitudes, signs), scales)


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

    def decode_into(self, blocks: npt.NDArray[np.void], out: Floats) -> None:
        """Write d * (0.5 + scale) / 4 * sign * table[index]; see `BlockType.decode_into`."""
        high = (blocks["qh"][:, :, None] >> _TWO_BITS_EACH) & np.uint8(3)
        index = high.reshape(-1, 32).astype(np.uint16) << np.uint16(8)
        index |= blocks["qs"]
        magnitudes = grids.magnitudes("iq2_s").take(index, mode="clip")
        signs = grids.signs(8).take(blocks["signs"], mode="clip")
        scales = split_pairs(blocks["scales"]) + np.float32(0.5)
        scales *= widen(blocks["d"]) * np.float32(0.25)
        write_scaled(out, _signed(magnitudes, signs), scales)


class IQ3_XXS(BlockType):
    """8 groups of 32 elements: value = d * (0.5 + scale) / 2 * sign * table[index].

    Byte j of `qs` is the index for the four elements from 4 * j. Signs and scales
    lie in integers of 32 bits, one for each group, as in IQ2_XXS.
    """

    code = 18
    block_size = 256
    layout = block_layout(("d", "<f2"), ("qs", "u1", 64), ("scales_and_signs", "<u4", 8))

    def decode_into(self, blocks: npt.NDArray[np.void], out: Floats) -> None:
        """Write d * (0.5 + scale) / 2 * sign * table[index]; see `BlockType.decode_into`."""
        signs, scales = _signs_and_scales(blocks["scales_and_signs"].astype(np.uint32))
        magnitudes = grids.magnitudes("iq3_xxs").take(blocks["qs"], mode="clip")
        scales *= widen(blocks["d"]) * np.float32(0.5)
        write_scaled(out, _signed(magnitudes, signs), scales)


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

    def decode_into(self, blocks: npt.NDArray[np.void], out: Floats) -> None:
        """Write d * (1 + 2 * scale) * sign * table[index]; see `BlockType.decode_into`."""
        index = single_bits(blocks["qh"]).astype(np.uint16) << np.uint16(8)
        index |= blocks["qs"]
        magnitudes = grids.magnitudes("iq3_s").take(index, mode="clip")
        signs = grids.signs(8).take(blocks["signs"], mode="clip")
        scales = widen(blocks["d"]) * (1 + 2 * split_pairs(blocks["scales"]))
        write_scaled(out, _signed(magnitudes, signs), scales)


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

    def decode_into(self, blocks: npt.NDArray[np.void], out: Floats) -> None:
        """Write d * (1 + 2 * scale) * (table[index] +- 1/8); see `BlockType.decode_into`."""
        words = blocks["qh"].astype(np.uint16)
        index = (words[:, :, None] >> _THREE_BITS_EACH) & np.uint16(7)
        index |= ((words >> np.uint16(12)) & np.uint16(8))[:, :, None]
        index <<= np.uint16(8)
        index = index.reshape(-1, 32)
        index |= blocks["qs"]
        eighths = grids.shifted_eighths().take(index, mode="clip").view(np.int8)
        odd = 2 * ((words >> np.uint16(12)) & np.uint16(7)) + 1
        write_scaled(out, eighths, widen(blocks["d"]) * np.float32(0.125) * odd.astype(np.float32))


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

    def decode_into(self, blocks: npt.NDArray[np.void], out: Floats) -> None:
        """Write d * (1 + 2 * scale) * (table[index] +- 1/8); see `BlockType.decode_into`."""
        index = split_pairs(blocks["qh"]).astype(np.uint16) << np.uint16(8)
        index |= blocks["qs"]
        eighths = grids.shifted_eighths().take(index, mode="clip").view(np.int8)

        words = blocks["scales"].astype(np.uint16)
        quarters = (words >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
        d = np.bitwise_or.reduce(quarters, axis=1).view(np.float16)
        odd = 2 * ((words[:, :, None] >> _THREE_BITS_EACH) & np.uint16(7)) + 1
        group_scales = odd.reshape(-1, 16).astype(np.float32)
        group_scales *= widen(d) * np.float32(0.125)
        write_scaled(out, eighths, group_scales)
