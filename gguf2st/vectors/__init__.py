"""Vectors of numbers inside compiled kernels: what is written is what the processor does.

A compiler makes vector code of a loop when it can prove that this changes nothing, and the short
loops over a block's codes are where it mostly can't. So kernels say it themselves:

    codes = load(raw, 2, 16)                      # 16 bytes of `raw` from byte 2 on
    store(out, 0, (floats(codes & 15) - 8) * d)   # 16 float32 of `out` from element 0 on

A vector has a kind (`u8`, `i8`, `u16`, `i32`, `f32` or `mask`) and any count of lanes; LLVM fits
it to the registers of the machine at hand. Lanes never mix but in `join` and
`transpose`, so results depend on no machine. Operators take two vectors, or a vector and a number,
which then stands in every lane and gets the vector's kind.

Nothing here checks bounds: callers give kernels arrays whose sizes they have checked.
"""

from gguf2st.vectors.functions import (
    absolute,
    bits_of,
    bytes_of,
    choose,
    count_up,
    downward,
    every,
    floats,
    from_bits,
    halves_of,
    integers,
    join,
    lane,
    look_up,
    multiply_add,
    nearest,
    repeat,
    signed,
    widen_half,
)
from gguf2st.vectors.memory import (
    load,
    load_halves,
    store,
    transpose,
    word16,
    word32,
)

__all__ = [
    "absolute",
    "bits_of",
    "bytes_of",
    "choose",
    "count_up",
    "downward",
    "every",
    "floats",
    "from_bits",
    "halves_of",
    "integers",
    "join",
    "lane",
    "load",
    "load_halves",
    "look_up",
    "multiply_add",
    "nearest",
    "repeat",
    "signed",
    "store",
    "transpose",
    "widen_half",
    "word16",
    "word32",
]
