"""What a vector is, and Python's operators on vectors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import imputils
from numba.core.typing import templates
from numba.extending import intrinsic as _intrinsic
from numba.extending import models, register_model

I32 = ir.IntType(32)
_LLVM_KINDS: dict[str, ir.Type] = {
    "mask": ir.IntType(1),
    "u8": ir.IntType(8),
    "i8": ir.IntType(8),
    "u16": ir.IntType(16),
    "i32": I32,
    "f32": ir.FloatType(),
}
NUMBERS: dict[str, Any] = {
    "u8": types.uint8,
    "i8": types.int8,
    "u16": types.uint16,
    "i32": types.int32,
    "f32": types.float32,
}
KINDS = {number: kind for kind, number in NUMBERS.items()}
INTEGERS = ("u8", "i8", "u16", "i32")

intrinsic: Any = _intrinsic


class Vector(types.Type):
    """Numba's type of a vector of `count` numbers of a kind."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count
        self.llvm = ir.VectorType(_LLVM_KINDS[kind], count)
        super().__init__(name=f"vector({count} x {kind})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


def repeated(builder: Any, number: Any, count: int) -> Any:
    """A vector with the number in every lane."""
    first = ir.Constant(I32, 0)
    one = builder.insert_element(
        ir.Constant(ir.VectorType(number.type, count), ir.Undefined), number, first
    )
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, count), [0] * count))


def _operator(symbol: Callable[..., Any], kinds: Sequence[str], emit: Callable[..., Any]) -> None:
    """Let an operator of Python work on vectors of these kinds, lane by lane."""
    compares = symbol in _COMPARISONS

    class Template(templates.AbstractTemplate):
        key = symbol

        def generic(self, arguments: Any, keywords: Any) -> Any:
            if len(arguments) != 2:
                return None
            first, second = arguments
            if not isinstance(first, Vector) or first.kind not in kinds:
                return None
            if isinstance(second, Vector):
                if second != first:
                    return None
            elif isinstance(second, types.Number | types.Boolean):
                second = NUMBERS[first.kind]
            else:
                return None
            result = Vector("mask", first.count) if compares else first
            return templates.signature(result, first, second)

    templates.infer_global(symbol)(Template)

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first, second = values
        if not isinstance(signature.args[1], Vector):
            second = repeated(builder, second, signature.args[0].count)
        return emit(builder, first, second)

    for kind in kinds:
        _LOWERINGS.setdefault(symbol, {})[kind] = lower

    @imputils.lower_builtin(symbol, Vector, types.Any)
    def lowered(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _LOWERINGS[symbol][signature.args[0].kind](context, builder, signature, values)


_LOWERINGS: dict[Callable[..., Any], dict[str, Callable[..., Any]]] = {}
_COMPARISONS = {
    operator.gt: ">",
    operator.ge: ">=",
    operator.lt: "<",
    operator.le: "<=",
    operator.eq: "==",
}


def _register_operators() -> None:
    for symbol, method in (
        (operator.and_, "and_"),
        (operator.or_, "or_"),
        (operator.xor, "xor"),
        (operator.lshift, "shl"),
    ):
        _operator(symbol, INTEGERS, lambda b, x, y, m=method: getattr(b, m)(x, y))
    _operator(operator.rshift, ("u8", "u16"), lambda b, x, y: b.lshr(x, y))
    _operator(operator.rshift, ("i8", "i32"), lambda b, x, y: b.ashr(x, y))
    for symbol, whole, real in (
        (operator.add, "add", "fadd"),
        (operator.sub, "sub", "fsub"),
        (operator.mul, "mul", "fmul"),
    ):
        _operator(symbol, INTEGERS, lambda b, x, y, m=whole: getattr(b, m)(x, y))
        _operator(symbol, ("f32",), lambda b, x, y, m=real: getattr(b, m)(x, y))
    _operator(operator.truediv, ("f32",), lambda b, x, y: b.fdiv(x, y))
    for symbol, sign in _COMPARISONS.items():
        _operator(symbol, ("f32",), lambda b, x, y, s=sign: b.fcmp_ordered(s, x, y))
        _operator(symbol, ("u8", "u16"), lambda b, x, y, s=sign: b.icmp_unsigned(s, x, y))
        _operator(symbol, ("i8", "i32"), lambda b, x, y, s=sign: b.icmp_signed(s, x, y))


_register_operators()
