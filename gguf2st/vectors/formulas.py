"""Formulas: functions of vectors that run once, while the kernel that calls them is compiled.

A formula is plain Python. What it gets are names (`Value`) for what the compiled code will hold,
and each operator and function that it applies adds an instruction to that code. Its own loops are
unrolled and its branches decided then; `loops.loop` and `loops.branch` make loops and branches of
the compiled code, and `choose` selects. Formulas call each other freely; to numba, which types and lowers a
kernel statement by statement, one is a single call, however much it computes.

A formula gets vectors, numbers (integers as 64 bits, floating-point ones as float32, constants as
Python's own), contiguous arrays, None and tuples of these; it returns vectors, numbers, a tuple of
these or nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, imputils
from numba.core.typing import templates

from gguf2st.vectors.types import KINDS, Vector, llvm_type, numba_type
from gguf2st.vectors.values import OPERATORS, Memory, Value, building


def formula(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let kernels call a module-level function as a formula."""
    _register(function, function, (types.VarArg(types.Any),))
    return function


def _register(symbol: Any, function: Callable[..., Any], *shapes: tuple[Any, ...]) -> None:
    """Have numba run `function` where it meets `symbol` with arguments of one of the shapes."""

    class Template(templates.AbstractTemplate):
        key = symbol
        prefer_literal = True

        def generic(self, arguments: Any, keywords: Any) -> Any:
            taken = tuple(map(_taken, arguments))
            if keywords or None in taken:
                return None
            if function is not symbol and not any(isinstance(each, Vector) for each in taken):
                return None  # Python's operators on numbers are numba's
            return templates.signature(_result(function, taken), *taken)

    templates.infer_global(symbol, types.Function(Template))

    def lower(context: Any, llvm_builder: Any, signature: Any, values: Any) -> Any:
        with building(llvm_builder):
            given = [
                _given(context, llvm_builder, kind, value)
                for kind, value in zip(signature.args, values, strict=True)
            ]
            result = function(*given)
        if result is None:
            return context.get_dummy_value()
        if isinstance(result, tuple):
            parts = [each.llvm for each in result]
            return context.make_tuple(llvm_builder, signature.return_type, parts)
        return result.llvm

    for shape in shapes:
        imputils.lower_builtin(symbol, *shape)(lower)


def _is_tuple(kind: Any) -> bool:
    return isinstance(kind, types.BaseTuple)


def _taken(kind: Any) -> Any:
    """The type as which a formula takes an argument; None if it can't."""
    if isinstance(kind, types.IntegerLiteral | types.NoneType | Vector):
        return kind
    if isinstance(kind, types.Boolean):
        return types.boolean
    if isinstance(kind, types.Integer):
        return types.int64
    if isinstance(kind, types.Float):
        return types.float32
    if isinstance(kind, types.Array) and kind.layout == "C":
        return kind
    if _is_tuple(kind):
        parts = tuple(map(_taken, map(types.unliteral, kind)))
        return None if None in parts else types.BaseTuple.from_types(parts)
    return None


def _given(context: Any, llvm_builder: Any, kind: Any, value: Any) -> Any:
    """An argument of a formula, from numba's type and value."""
    if isinstance(kind, types.IntegerLiteral):
        return kind.literal_value
    if isinstance(kind, types.NoneType):
        return None
    if _is_tuple(kind):
        parts = cgutils.unpack_tuple(llvm_builder, value)
        return tuple(_given(context, llvm_builder, *each) for each in zip(kind, parts, strict=True))
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, llvm_builder, value=value)
        return Memory(array.data, KINDS[kind.dtype])
    if isinstance(kind, Vector):
        return Value(value, kind.kind, kind.count)
    return Value(value, KINDS[kind])


@cache
def _result(function: Callable[..., Any], kinds: Sequence[Any]) -> Any:
    """The type of a formula's result: it is run on arguments without values."""
    module = ir.Module()
    nowhere = ir.Function(module, ir.FunctionType(ir.VoidType(), ()), "nowhere")
    with building(ir.IRBuilder(nowhere.append_basic_block())):
        result = function(*map(_unknown, kinds))
    if result is None:
        return types.void
    if isinstance(result, tuple):
        return types.BaseTuple.from_types([numba_type(one.kind, one.count) for one in result])
    return numba_type(result.kind, result.count)


def _unknown(kind: Any) -> Any:
    """An argument of a type, without a value."""
    if isinstance(kind, types.IntegerLiteral):
        return kind.literal_value
    if isinstance(kind, types.NoneType):
        return None
    if _is_tuple(kind):
        return tuple(map(_unknown, kind))
    if isinstance(kind, types.Array):
        pointer = llvm_type(KINDS[kind.dtype], 0).as_pointer()
        return Memory(ir.Constant(pointer, ir.Undefined), KINDS[kind.dtype])
    name, count = (kind.kind, kind.count) if isinstance(kind, Vector) else (KINDS[kind], 0)
    return Value(ir.Constant(llvm_type(name, count), ir.Undefined), name, count)


_PAIRS = (Vector, types.Any), (types.Any, Vector), (Vector, Vector)
for _symbol, *_ in OPERATORS:
    _register(_symbol, lambda first, second, symbol=_symbol: symbol(first, second), *_PAIRS)
_register(operator.neg, lambda vector: -vector, (Vector,))
