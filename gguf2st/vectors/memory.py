"""Vectors and numbers from and to arrays, which have to be contiguous."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils
from numba.np import numpy_support

from gguf2st.vectors.formulas import formula
from gguf2st.vectors.types import BITS, KINDS, llvm_type
from gguf2st.vectors.values import I32, Memory, Operand, Value, as_kind, builder


def _load(address: Any, kind: str, count: int, alignment: int) -> Value:
    pointer = llvm_type(kind, count).as_pointer()
    loaded = builder().load(builder().bitcast(address, pointer))
    loaded.align = alignment
    return Value(loaded, kind, count)


def _store(address: Any, vector: Value) -> None:
    pointer = vector.llvm.type.as_pointer()
    builder().store(vector.llvm, builder().bitcast(address, pointer)).align = _size(vector.kind)


def _size(kind: str) -> int:
    return BITS[kind] // 8


@formula
def load(array: Memory | npt.NDArray[Any], start: Operand, count: int = 0) -> Value:
    """Elements `start` to `start + count` of an array, or the one element `start` as a number.

    A formula can also load from a table of numpy's; the kernel then holds its values.
    """
    memory = array if isinstance(array, Memory) else _table(array)
    return _load(memory.at(start), memory.kind, count, _size(memory.kind))


def _table(values: npt.NDArray[Any]) -> Memory:
    """The memory of a table in the code that is being compiled."""
    kind = KINDS[numpy_support.from_dtype(values.dtype)]
    raw = bytearray(values.tobytes())
    name = f"table.{hashlib.sha256(raw).hexdigest()[:16]}"
    module = builder().module
    if name in module.globals:
        table = module.globals[name]
    else:
        table = cgutils.global_constant(
            module, name, ir.Constant(ir.ArrayType(ir.IntType(8), len(raw)), raw)
        )
        table.align = _size(kind)
    return Memory(builder().bitcast(table, llvm_type(kind, 0).as_pointer()), kind)


@formula
def byte(raw: Memory, start: Operand) -> Value:
    """A byte of a uint8 array as an integer."""
    return as_kind(_load(raw.at(start), "u8", 0, 1), "i64")


@formula
def load_halves(raw: Memory, start: Operand, count: int) -> Value:
    """Integers of 16 bits (u16) that lie in a uint8 array from byte `start` on."""
    return _load(raw.at(start), "u16", count, 1)


@formula
def word16(raw: Memory, start: Operand) -> Value:
    """Two bytes of a uint8 array as an integer, the lowest first."""
    return as_kind(_load(raw.at(start), "u16", 0, 1), "i64")


@formula
def word32(raw: Memory, start: Operand) -> Value:
    """Four bytes of a uint8 array as an integer, the lowest first."""
    return as_kind(_load(raw.at(start), "u32", 0, 1), "i64")


@formula
def store(array: Memory, start: Operand, vector: Value) -> None:
    """Write a vector over elements `start` and following of an array of its kind, or a number."""
    if array.kind != vector.kind:
        raise TypeError(f"an array of {array.kind} can't hold {vector.kind}")
    _store(array.at(start), vector)


@formula
def transpose(
    source: Memory, start: Operand, stride: Operand, target: Memory, to: Operand, distance: Operand
) -> None:
    """Transpose 16 rows of 16 elements between arrays of the same dtype.

    Rows begin at elements `start`, `start + stride`, ... of the source, and columns at `to`,
    `to + distance`, ... of the target.
    """
    size, start, to = _size(source.kind), as_kind(start, "i64"), as_kind(to, "i64")
    stride, distance = as_kind(stride, "i64"), as_kind(distance, "i64")
    rows = [_load(source.at(start + stride * row), source.kind, 16, size) for row in range(16)]
    for row, vector in enumerate(transposed(rows)):
        _store(target.at(to + distance * row), vector)


def transposed(rows: list[Value]) -> list[Value]:
    """The columns of 2, 4, 8 or 16 vectors of 16 lanes, one after the other in as many vectors."""
    half, kind = len(rows) // 2, rows[0].kind
    # Interleaving the first half of the rows with the second, until all are side by side.
    orders = [[lane for k in range(8) for lane in (at + k, 16 + at + k)] for at in (0, 8)]
    low, high = (ir.Constant(ir.VectorType(I32, 16), order) for order in orders)
    for _ in range(half.bit_length()):
        pairs = list(zip(rows[:half], rows[half:], strict=True))
        rows = [
            Value(builder().shuffle_vector(one.llvm, other.llvm, order), kind, 16)
            for one, other in pairs
            for order in (low, high)
        ]
    return rows
