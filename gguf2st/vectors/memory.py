"""Vectors and numbers from and to arrays, which have to be contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from gguf2st.vectors.types import I32, KINDS, NUMBERS, Vector, intrinsic


def address_of(context: Any, builder: Any, types_: Sequence[Any], values: Sequence[Any]) -> Any:
    """Where element `values[1]` of the array `values[0]` lies."""
    array = context.make_array(types_[0])(context, builder, value=values[0])
    index = context.cast(builder, values[1], types_[1], types.intp)
    return builder.gep(array.data, [index])


@intrinsic(prefer_literal=True)
def load(typing: Any, array: Any, start: Any, count: Any) -> Any:
    """Elements `start` to `start + count` of a contiguous array; `count` is a literal."""
    result = Vector(KINDS[array.dtype], count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = address_of(context, builder, signature.args, values)
        loaded = builder.load(builder.bitcast(address, result.llvm.as_pointer()))
        loaded.align = array.dtype.bitwidth // 8
        return loaded

    return result(array, start, count), generate


@intrinsic
def store(typing: Any, array: Any, start: Any, vector: Any) -> Any:
    """Write a vector over elements `start` and following of a contiguous array of its kind."""
    if array.dtype is not NUMBERS[vector.kind]:
        return None

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = address_of(context, builder, signature.args, values)
        stored = builder.store(values[2], builder.bitcast(address, vector.llvm.as_pointer()))
        stored.align = array.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(array, start, vector), generate


def _read_number(bits: int) -> Any:
    @intrinsic
    def read(typing: Any, raw: Any, start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address = address_of(context, builder, signature.args, values)
            number = builder.load(builder.bitcast(address, ir.IntType(bits).as_pointer()))
            number.align = 1
            return builder.zext(number, ir.IntType(64))

        return types.int64(raw, start), generate

    return read


word16 = _read_number(16)  # two bytes of a uint8 array as an integer, the lowest first
word32 = _read_number(32)  # four bytes


@intrinsic(prefer_literal=True)
def load_halves(typing: Any, raw: Any, start: Any, count: Any) -> Any:
    """Integers of 16 bits (u16) that lie in a uint8 array from byte `start` on."""
    result = Vector("u16", count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = address_of(context, builder, signature.args, values)
        loaded = builder.load(builder.bitcast(address, result.llvm.as_pointer()))
        loaded.align = 1
        return loaded

    return result(raw, start, count), generate


@intrinsic
def transpose(
    typing: Any, source: Any, start: Any, stride: Any, target: Any, to: Any, distance: Any
) -> Any:
    """Transpose 16 rows of 16 elements between contiguous arrays of the same dtype.

    Rows begin at elements `start`, `start + stride`, ... of the source, and columns at `to`,
    `to + distance`, ... of the target.
    """
    vector, lanes = Vector(KINDS[source.dtype], 16), range(16)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def addresses(array: Any, first: Any, step: Any) -> list[Any]:
            address = address_of(context, builder, (signature.args[array], types.int64), first)
            offsets = [builder.mul(step, ir.Constant(step.type, lane)) for lane in lanes]
            pointers = [builder.gep(address, [offset]) for offset in offsets]
            return [builder.bitcast(p, vector.llvm.as_pointer()) for p in pointers]

        rows = []
        for address in addresses(0, values[:2], values[2]):
            rows.append(builder.load(address))
            rows[-1].align = source.dtype.bitwidth // 8
        # Interleaving row i with row i + 8, four times, leaves columns where rows were.
        low, high = (
            ir.Constant(
                ir.VectorType(I32, 16), [i for k in range(8) for i in (first + k, 16 + first + k)]
            )
            for first in (0, 8)
        )
        for _ in range(4):
            pairs = list(zip(rows[:8], rows[8:], strict=True))
            rows = [builder.shuffle_vector(*pair, order) for pair in pairs for order in (low, high)]
        for row, address in zip(rows, addresses(3, values[3:5], values[5]), strict=True):
            builder.store(row, address).align = source.dtype.bitwidth // 8
        return context.get_dummy_value()

    number = types.int64
    return types.void(source, number, number, target, number, number), generate
