"""Types that store each element by itself: floating point and integers."""

from gguf2st.gguf.blocks.base import Blocks, BlockType, block_layout
from gguf2st.gguf.blocks.bits import Floats, float_bits


class PlainType(BlockType):
    """One number an element: a block is the number, in its field `value`.

    Decoding rounds once, to the nearest float32. That is exact for F32, F16, I8
    and I16. Integers of more than 24 bits and F64 may lose bits (and a large F64
    becomes infinite): `values_rows` returns them as they are.
    """

    block_size = 1

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write the nearest float32 of each value; see `BlockType.decode_into`."""
        out[:, 0] = blocks["value"]


class F32(PlainType):
    """IEEE single precision."""

    code = 0
    layout = block_layout(("value", "<f4"))


class F16(PlainType):
    """IEEE half precision."""

    code = 1
    layout = block_layout(("value", "<f2"))


class BF16(PlainType):
    """The upper half of an IEEE single, kept as the integer of its bits.

    Source: `ggml_compute_bf16_to_fp32` in ggml/src/ggml-impl.h.
    """

    code = 30
    layout = block_layout(("value", "<u2"))

    def decode_into(self, blocks: Blocks, out: Floats) -> None:
        """Write each value with sixteen zero bits below; see `BlockType.decode_into`."""
        bits = float_bits(out)
        bits[:, 0] = blocks["value"]
        bits <<= 16


class F64(PlainType):
    """IEEE double precision."""

    code = 28
    layout = block_layout(("value", "<f8"))


class I8(PlainType):
    """Signed integer of 8 bits."""

    code = 24
    layout = block_layout(("value", "i1"))


class I16(PlainType):
    """Signed integer of 16 bits."""

    code = 25
    layout = block_layout(("value", "<i2"))


class I32(PlainType):
    """Signed integer of 32 bits."""

    code = 26
    layout = block_layout(("value", "<i4"))


class I64(PlainType):
    """Signed integer of 64 bits."""

    code = 27
    layout = block_layout(("value", "<i8"))
