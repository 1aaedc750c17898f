# ruff: noqa: N801 (the classes bear the names that ggml and its files use)
"""Blocks of 256 elements that are minus one, zero or plus one times a scale.

The formulas are those of `dequantize_row_tq*` in ggml/src/ggml-quants.c.
"""

from gguf2st.arrays import signed
from gguf2st.gguf.blocks.base import Blocks, BlockType, block_layout
from gguf2st.gguf.blocks.bits import Floats, join, split, widen, write_scaled


class TQ1_0(BlockType):
    """256 ternary digits, five (in `qh`: four) in a byte: value = d * (digit - 1).

    A byte is a fraction of 256 in base three: multiplied by 3 ** i modulo 256 it
    begins with digit i. Digit i of byte j is element 32 * i + j for the first 32
    bytes of `qs`, element 160 + 16 * i + j for its other 16 bytes, and element
    240 + 4 * i + j for the 4 bytes of `qh`.
    """

    code = 34
    block_size = 256
    layout = block_layout(("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2"))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (digit - 1); see `BlockType.decode_into`."""
        stretches = ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4))
        fractions = join(
            [packed * 3**position for packed, digits in stretches for position in range(digits)]
        )
        # The first digit is fraction * 3 // 256: 0 up to 85, 1 up to 170, then 2.
        digits_less_one = signed(fractions > 85)
        digits_less_one += signed(fractions > 170)
        digits_less_one -= 1
        write_scaled(out, digits_less_one, widen(blocks["d"]))


class TQ2_0(BlockType):
    """256 codes of 2 bits: value = d * (code - 1).

    Each half of the block has 32 bytes: bits 2 * i and 2 * i + 1 of byte j are
    element 32 * i + j of that half. Code 3 is never written, but means 2 * d.
    """

    code = 35
    block_size = 256
    layout = block_layout(("qs", "u1", 64), ("d", "<f2"))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write d * (code - 1); see `BlockType.decode_into`."""
        codes = signed(split(blocks["qs"], bits=2, width=32))
        codes -= 1
        write_scaled(out, codes, widen(blocks["d"]))
