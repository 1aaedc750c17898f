"""What a vector is to numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

# How LLVM holds a number of each kind; a mask is the result of a comparison.
LLVM_KINDS: dict[str, Any] = {
    "mask": ir.IntType(1),
    "u8": ir.IntType(8),
    "i8": ir.IntType(8),
    "u16": ir.IntType(16),
    "u32": ir.IntType(32),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
NUMBERS: dict[str, Any] = {
    "mask": types.boolean,
    "u8": types.uint8,
    "i8": types.int8,
    "u16": types.uint16,
    "u32": types.uint32,
    "i32": types.int32,
    "i64": types.int64,
    "f32": types.float32,
    "f64": types.float64,
}
KINDS = {number: kind for kind, number in NUMBERS.items()}
UNSIGNED = ("mask", "u8", "u16", "u32")
REAL = ("f32", "f64")
BITS = {"f32": 32, "f64": 64} | {
    kind: whole.width for kind, whole in LLVM_KINDS.items() if kind not in REAL
}


class Vector(types.Type):
    """Numba's type of a vector of `count` numbers of a kind."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count
        super().__init__(name=f"vector({count} x {kind})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, llvm_type(vector.kind, vector.count))


def llvm_type(kind: str, count: int) -> Any:
    """LLVM's type of a vector, or of one number where `count` is 0."""
    return ir.VectorType(LLVM_KINDS[kind], count) if count else LLVM_KINDS[kind]


def numba_type(kind: str, count: int) -> Any:
    """Numba's type of the same."""
    return Vector(kind, count) if count else NUMBERS[kind]
