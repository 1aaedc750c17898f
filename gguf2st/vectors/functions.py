"""Functions of vectors and numbers: conversions, choices, what LLVM has for them."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from gguf2st.vectors.formulas import formula
from gguf2st.vectors.types import REAL, llvm_type
from gguf2st.vectors.values import I32, Operand, Value, alike, as_kind, builder


@formula
def repeat(number: Operand, count: int) -> Value:
    """A vector with a number in every lane: f32 of a floating-point number, i32 of an integer."""
    real = number.kind in REAL if isinstance(number, Value) else isinstance(number, float)
    return as_kind(number, "f32" if real else "i32", count)


@formula
def choose(mask: Value, first: Operand, second: Operand) -> Value:
    """Lanes of `first` where the mask holds, else of `second`; either may be a number."""
    if not isinstance(first, Value) and not isinstance(second, Value):
        kind = "f32" if isinstance(first, float) or isinstance(second, float) else "i32"
        first = as_kind(first, kind, mask.count)
    one, other = alike(first, second)
    return Value(builder().select(mask.llvm, one.llvm, other.llvm), one.kind, one.count)


@formula
def smaller(first: Operand, second: Operand) -> Value:
    """The smaller of each two numbers; the second where one of them isn't a number."""
    one, other = alike(first, second)
    return choose(one < other, one, other)


@formula
def larger(first: Operand, second: Operand) -> Value:
    """The larger of each two numbers; the second where one of them isn't a number."""
    one, other = alike(first, second)
    return choose(one > other, one, other)


@formula
def floats(vector: Value) -> Value:
    """The float32 nearest to each integer."""
    # By way of int32: processors have an instruction for that.
    return as_kind(as_kind(vector, "i32"), "f32")


@formula
def integers(vector: Value) -> Value:
    """float32 without their fractions, or smaller integers, as int32."""
    return as_kind(vector, "i32")


@formula
def doubles(vector: Value) -> Value:
    """The same numbers as float64."""
    return as_kind(vector, "f64")


@formula
def bytes_of(vector: Value) -> Value:
    """The lowest 8 bits of int32, as u8."""
    return as_kind(vector, "u8")


@formula
def halves_of(vector: Value) -> Value:
    """The lowest 16 bits of int32, as u16."""
    return as_kind(vector, "u16")


@formula
def signed(vector: Value) -> Value:
    """u8 as i8: the same bits."""
    return as_kind(vector, "i8")


@formula
def paired(vector: Value) -> Value:
    """u8 as u16: of each pair, the first has the low bits."""
    count = vector.count // 2
    return Value(builder().bitcast(vector.llvm, llvm_type("u16", count)), "u16", count)


@formula
def bits_of(vector: Value) -> Value:
    """The int32 of the bits of float32."""
    return _reinterpreted(vector, "i32")


@formula
def from_bits(vector: Value) -> Value:
    """The float32 whose bits an int32 has."""
    return _reinterpreted(vector, "f32")


def _reinterpreted(value: Value, kind: str) -> Value:
    target = llvm_type(kind, value.count)
    return Value(builder().bitcast(value.llvm, target), kind, value.count)


@formula
def multiply_add(a: Operand, b: Operand, c: Operand) -> Value:
    """a * b + c with one rounding, as IEEE 754 defines it; of float32, or of float64."""
    given = [value for value in (a, b, c) if isinstance(value, Value)]
    kind = "f64" if any(value.kind == "f64" for value in given) else "f32"
    count = max(value.count for value in given)
    return _by_llvm("fma", *(as_kind(value, kind, count) for value in (a, b, c)))


@formula
def nearest(vector: Value) -> Value:
    """Each float32 rounded to an integer, ties to even."""
    return _by_llvm("rint", vector)


@formula
def downward(vector: Value) -> Value:
    """Each float32 rounded down to an integer."""
    return _by_llvm("floor", vector)


@formula
def absolute(vector: Value) -> Value:
    """Each float32 without its sign."""
    return _by_llvm("fabs", vector)


def _by_llvm(name: str, *values: Value) -> Value:
    """Call a function that LLVM has for real numbers, and for vectors of them."""
    first = values[0]
    kind = llvm_type(first.kind, first.count)
    full_name = f"llvm.{name}.{f'v{first.count}' if first.count else ''}{first.kind}"
    declared = ir.FunctionType(kind, [kind] * len(values))
    function = cgutils.get_or_insert_function(builder().module, declared, full_name)
    result = builder().call(function, [value.llvm for value in values])
    return Value(result, first.kind, first.count)


@formula
def join(first: Value, second: Value) -> Value:
    """The lanes of one vector, then those of another of the same kind and count."""
    count = 2 * first.count
    order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
    return Value(builder().shuffle_vector(first.llvm, second.llvm, order), first.kind, count)


@formula
def some_lanes(vector: Value, first: int, count: int) -> Value:
    """Some neighbouring lanes of a vector."""
    order = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
    return Value(builder().shuffle_vector(vector.llvm, vector.llvm, order), vector.kind, count)


@formula
def lane(vector: Value, index: Operand) -> Value:
    """One number of a vector."""
    place = as_kind(index, "i32").llvm
    return Value(builder().extract_element(vector.llvm, place), vector.kind)


@formula
def count_up(count: int) -> Value:
    """The int32 numbers 0, 1, 2, ..., `count` of them."""
    return Value(ir.Constant(llvm_type("i32", count), list(range(count))), "i32", count)


@formula
def look_up(codes: Value, entries: Sequence[Operand]) -> Value:
    """For each code of 4 bits (u8), its entry of a tuple of 16 integers, as i8.

    Half of the entries go for each bit of the code: 15 selections for as many codes as a
    register holds, where a look-up in memory is one load for each code.
    """
    left = [as_kind(entry, "i8", codes.count) for entry in entries]
    for bit in range(4):
        unset = codes & (1 << bit) == 0
        left = [choose(unset, even, odd) for even, odd in zip(left[::2], left[1::2], strict=True)]
    return left[0]


@formula
def widen_half(bits: Value) -> Value:
    """The float32 that equals a half-precision number, given as an integer of its bits."""
    # Not LLVM's own conversion, which is a call of a library where processors lack it.
    word = as_kind(bits, "i32")
    magnitude = (word & 0x7FFF) << 13
    # The exponents differ by 112; a product takes care of subnormal numbers, too.
    scaled = bits_of(from_bits(magnitude) * 2.0**112)
    number = choose(magnitude < 0x0F800000, scaled, magnitude | 0x7F800000)
    return from_bits(number | (word & 0x8000) << 16)


@formula
def every(mask: Value) -> Value:
    """Whether a mask holds in all lanes."""
    word = builder().bitcast(mask.llvm, ir.IntType(mask.count))
    return Value(builder().icmp_unsigned("==", word, ir.Constant(word.type, -1)), "mask")
