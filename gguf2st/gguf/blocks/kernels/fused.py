"""Decoding and what follows it in one kernel, so that float32 values never leave a core's first cache.

A kernel gets a block type's decoder as an address, and calls it for as many blocks as the cache
holds. So it is compiled once, not for each block type.
"""

from functools import cache
from typing import Any

from numba import float32, types, uint8
from numba.extending import intrinsic

from gguf2st.gguf.blocks.kernels import kernel_named
from gguf2st.jit import kernel
from gguf2st.rounding_kernels import bfloat16, float16

_RAW, _VALUES = uint8[::1], float32[::1]
_intrinsic: Any = intrinsic


@cache
def decoder_of(name: str) -> int:
    """The address of a block type's compiled decoder, for `decode`."""
    found: Any = kernel_named(name)
    found.compile((_RAW, _VALUES))
    (compiled,) = (
        each for arguments, each in found.overloads.items() if arguments == (_RAW, _VALUES)
    )
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


@_intrinsic
def decode(typing: Any, decoder: Any, raw: Any, out: Any) -> Any:
    """Decode whole blocks, uint8, to float32, both contiguous; only in kernels."""
    arguments = (_RAW, _VALUES)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        convention = context.call_conv
        kind = convention.get_function_type(types.none, arguments).as_pointer()
        function = builder.inttoptr(values[0], kind)
        convention.call_function(builder, function, types.none, arguments, values[1:])
        return context.get_dummy_value()

    return types.none(types.int64, *arguments), generate


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
