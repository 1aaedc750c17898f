"""Decoding and rounding in one kernel, so that float32 values never leave a core's first cache.

A kernel is compiled for each type of block that it meets: a `Decoder` has a numba type of its
own for each name, and `decode` stands for the kernel of that name. Compiled kernels are kept under
these types, so a later process finds them.
"""

from typing import Any

from numba import types
from numba.extending import NativeValue, models, overload, register_model, typeof_impl, unbox

from gguf2st.gguf.blocks.kernels import kernel_named
from gguf2st.jit import kernel
from gguf2st.rounding_kernels import bfloat16, float16


class Decoder:
    """The name of a block type, for kernels."""

    def __init__(self, name: str) -> None:
        self.name = name


class _DecoderType(types.Type):
    def __init__(self, name: str) -> None:
        self.block_type = name
        super().__init__(name=f"Decoder({name})")


@typeof_impl.register(Decoder)
def _type_of(decoder: Decoder, context: Any) -> _DecoderType:
    return _DecoderType(decoder.name)


register_model(_DecoderType)(models.OpaqueModel)


@unbox(_DecoderType)
def _unbox(kind: _DecoderType, decoder: Any, context: Any) -> NativeValue:
    return NativeValue(context.context.get_dummy_value())


def decode(decoder, raw, out):
    """Decode whole blocks; only in kernels."""
    raise NotImplementedError


@overload(decode)
def _decode(decoder, raw, out):
    function: Any = kernel_named(decoder.block_type)
    return lambda decoder, raw, out: function(raw, out)


@kernel
def to_bfloat16(decoder, raw, out, scratch, block_bytes, block_size):
    """Decode whole blocks, uint8, to bfloat16, uint16; return how many aren't finite.

    `scratch` is float32 for as many values as the first cache holds beside their blocks, a
    multiple of all block sizes.
    """
    count, step = 0, scratch.size // block_size
    blocks = raw.size // block_bytes
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        values = scratch[: (stop - start) * block_size]
        decode(decoder, raw[start * block_bytes : stop * block_bytes], values)
        count += bfloat16(values, out[start * block_size : stop * block_size])
    return count


@kernel
def to_float16(decoder, raw, out, scratch, block_bytes, block_size):
    """The same to half precision."""
    count, step = 0, scratch.size // block_size
    blocks = raw.size // block_bytes
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        values = scratch[: (stop - start) * block_size]
        decode(decoder, raw[start * block_bytes : stop * block_bytes], values)
        count += float16(values, out[start * block_size : stop * block_size])
    return count
