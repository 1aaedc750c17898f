"""Vectors of numbers inside compiled kernels: what is written is what the processor does.

A compiler makes vector code of a loop when it can prove that this changes nothing, and the short
loops over a block's codes are where it mostly can't. So kernels say it themselves:

    @formula
    def decoded(raw, at, out, to):
        d = widen_half(word16(raw, at))
        codes = load(raw, at + 2, 16)                  # 16 bytes of `raw`
        store(out, to, (floats(codes & 15) - 8) * d)   # 16 float32 of `out`

    @kernel
    def decode(raw, out):
        for block in range(raw.size // 18):
            decoded(raw, 18 * block, out, 32 * block)

A formula is run once, while the kernel is compiled; see `formulas`. Kernels can use vectors and their
functions directly, too, but a formula takes a tenth of the time to compile.

A vector has a kind (`u8`, `i8`, `u16`, `i32`, `f32`, `f64` or `mask`) and any count of lanes; LLVM
fits it to the registers of the machine at hand. Lanes never mix but in `join`, `lane`, `paired` and
`transpose`, so results depend on no machine. Operators take two vectors, or a vector and a number,
which then stands in every lane and gets the vector's kind.

Nothing here checks bounds: callers give kernels arrays whose sizes they have checked.
"""

from gguf2st.vectors.formulas import formula
from gguf2st.vectors.functions import (
    absolute,
    bits_of,
    bytes_of,
    choose,
    count_up,
    doubles,
    downward,
    every,
    floats,
    from_bits,
    halves_of,
    integers,
    join,
    lane,
    larger,
    look_up,
    multiply_add,
    nearest,
    paired,
    repeat,
    signed,
    smaller,
    some_lanes,
    widen_half,
)
from gguf2st.vectors.loops import branch, loop
from gguf2st.vectors.memory import (
    byte,
    load,
    load_halves,
    store,
    transpose,
    transposed,
    word16,
    word32,
)

__all__ = [
    "absolute",
    "bits_of",
    "branch",
    "byte",
    "bytes_of",
    "choose",
    "count_up",
    "doubles",
    "downward",
    "every",
    "floats",
    "formula",
    "from_bits",
    "halves_of",
    "integers",
    "join",
    "lane",
    "larger",
    "load",
    "load_halves",
    "look_up",
    "loop",
    "multiply_add",
    "nearest",
    "paired",
    "repeat",
    "signed",
    "smaller",
    "some_lanes",
    "store",
    "transpose",
    "transposed",
    "widen_half",
    "word16",
    "word32",
]
