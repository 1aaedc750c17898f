"""Functions of vectors: conversions, choices, what LLVM has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from gguf2st.vectors.types import I32, NUMBERS, Vector, intrinsic, repeated


@intrinsic(prefer_literal=True)
def repeat(typing: Any, number: Any, count: Any) -> Any:
    """A vector with a number in every lane: f32 of a floating-point number, i32 of an integer."""
    kind = "f32" if isinstance(types.unliteral(number), types.Float) else "i32"
    result = Vector(kind, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return repeated(builder, values[0], result.count)

    return result(NUMBERS[kind], count), generate


@intrinsic
def choose(typing: Any, mask: Any, first: Any, second: Any) -> Any:
    """Lanes of `first` where the mask holds, else of `second`; one of them may be a number."""
    kind = first if isinstance(first, Vector) else second
    signature_types = [
        given if isinstance(given, Vector) else NUMBERS[kind.kind] for given in (first, second)
    ]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        lanes = [
            value if isinstance(given, Vector) else repeated(builder, value, kind.count)
            for value, given in zip(values[1:], signature.args[1:], strict=True)
        ]
        return builder.select(values[0], *lanes)

    return kind(mask, *signature_types), generate


@intrinsic
def floats(typing: Any, vector: Any) -> Any:
    """The float32 nearest to each integer."""
    result = Vector("f32", vector.count)
    wide = ir.VectorType(I32, vector.count)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (value,) = values
        if vector.kind != "i32":
            value = (builder.sext if vector.kind == "i8" else builder.zext)(value, wide)
        return builder.sitofp(value, result.llvm)

    return result(vector), generate


@intrinsic
def integers(typing: Any, vector: Any) -> Any:
    """float32 without their fractions, or smaller integers, as int32."""
    result = Vector("i32", vector.count)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if vector.kind == "f32":
            return builder.fptosi(values[0], result.llvm)
        return (builder.sext if vector.kind == "i8" else builder.zext)(values[0], result.llvm)

    return result(vector), generate


def _lowest_bits(kind: str) -> Any:
    @intrinsic
    def narrow(typing: Any, vector: Any) -> Any:
        result = Vector(kind, vector.count)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.trunc(values[0], result.llvm)

        return result(vector), generate

    return narrow


bytes_of = _lowest_bits("u8")  # the lowest 8 bits of int32
halves_of = _lowest_bits("u16")  # the lowest 16 bits of int32


def _reinterpreted(kind: str) -> Any:
    @intrinsic
    def reinterpret(typing: Any, vector: Any) -> Any:
        result = Vector(kind, vector.count)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], result.llvm)

        return result(vector), generate

    return reinterpret


signed = _reinterpreted("i8")  # u8 as i8
bits_of = _reinterpreted("i32")  # float32 as the int32 of its bits
from_bits = _reinterpreted("f32")  # int32 as the float32 whose bits it is


@intrinsic
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding, as IEEE 754 defines it; all three are vectors, or numbers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _call_llvm(builder, "fma", c, values) if vectors else builder.fma(*values)

    vectors = isinstance(c, Vector)
    return c(c, c, c), generate


def _call_llvm(builder: Any, name: str, vector: Vector, values: Sequence[Any]) -> Any:
    """Call a function that LLVM has for vectors of float32."""
    function = ir.FunctionType(vector.llvm, [vector.llvm] * len(values))
    name = f"llvm.{name}.v{vector.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), values)


def _by_llvm(name: str) -> Any:
    @intrinsic
    def function(typing: Any, vector: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return _call_llvm(builder, name, vector, values)

        return vector(vector), generate

    return function


nearest = _by_llvm("rint")  # each float32 rounded to an integer, ties to even
downward = _by_llvm("floor")
absolute = _by_llvm("fabs")


@intrinsic
def join(typing: Any, first: Any, second: Any) -> Any:
    """The lanes of one vector, then those of another of the same kind and count."""
    result = Vector(first.kind, 2 * first.count)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        order = ir.Constant(ir.VectorType(I32, result.count), list(range(result.count)))
        return builder.shuffle_vector(*values, order)

    return result(first, second), generate


@intrinsic
def lane(typing: Any, vector: Any, index: Any) -> Any:
    """One number of a vector."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.extract_element(values[0], builder.trunc(values[1], I32))

    return NUMBERS[vector.kind](vector, types.int64), generate


@intrinsic(prefer_literal=True)
def count_up(typing: Any, count: Any) -> Any:
    """The int32 numbers 0, 1, 2, ..., `count` of them."""
    result = Vector("i32", count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return ir.Constant(result.llvm, list(range(result.count)))

    return result(count), generate


@intrinsic
def look_up(typing: Any, codes: Any, entries: Any) -> Any:
    """For each code of 4 bits (u8), its entry of a tuple of 16 integers, as i8.

    Half of the entries go for each bit of the code: 15 selections for as many codes as a
    register holds, where a look-up in memory is one load for each code.
    """
    result = Vector("i8", codes.count)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        left = [
            repeated(builder, builder.trunc(entry, ir.IntType(8)), codes.count)
            for entry in cgutils.unpack_tuple(builder, values[1])
        ]
        for bit in range(4):
            chosen = builder.and_(values[0], ir.Constant(codes.llvm, [1 << bit] * codes.count))
            mask = builder.icmp_unsigned("!=", chosen, ir.Constant(codes.llvm, [0] * codes.count))
            left = [
                builder.select(mask, odd, even)
                for even, odd in zip(left[::2], left[1::2], strict=True)
            ]
        return left[0]

    return result(codes, types.UniTuple(types.int64, 16)), generate


@intrinsic
def widen_half(typing: Any, bits: Any) -> Any:
    """The float32 that equals a half-precision number, given as an integer of its bits."""
    # Not LLVM's own conversion, which is a call of a library where processors lack it.

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def constant(number: int) -> Any:
            return ir.Constant(I32, number)

        word = builder.trunc(values[0], I32)
        magnitude = builder.shl(builder.and_(word, constant(0x7FFF)), constant(13))
        sign = builder.shl(builder.and_(word, constant(0x8000)), constant(16))
        # The exponents differ by 112; a product takes care of subnormal numbers, too.
        scaled = builder.fmul(
            builder.bitcast(magnitude, ir.FloatType()), ir.Constant(ir.FloatType(), 2.0**112)
        )
        finite = builder.icmp_unsigned("<", magnitude, constant(0x0F800000))
        number = builder.select(
            finite, builder.bitcast(scaled, I32), builder.or_(magnitude, constant(0x7F800000))
        )
        return builder.bitcast(builder.or_(number, sign), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def every(typing: Any, mask: Any) -> Any:
    """Whether a mask holds in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = builder.bitcast(values[0], ir.IntType(mask.count))
        return builder.icmp_unsigned("==", word, ir.Constant(word.type, -1))

    return types.boolean(mask), generate
