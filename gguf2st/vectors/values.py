"""Vectors and numbers as formulas see them: names for what the compiled code will compute."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from gguf2st.vectors.types import BITS, REAL, UNSIGNED, llvm_type

I32 = ir.IntType(32)
_state = threading.local()


@contextmanager
def building(builder: Any) -> Iterator[None]:
    """Let formulas that run inside the block add their instructions to a builder of llvmlite."""
    before = getattr(_state, "builder", None)
    _state.builder = builder
    try:
        yield
    finally:
        _state.builder = before


def builder() -> Any:
    """The builder that formulas add to."""
    return _state.builder


@dataclass(frozen=True)
class Memory:
    """A contiguous array: the address of its first element, and the kind of all."""

    address: Any
    kind: str

    def at(self, index: Operand) -> Any:
        """The address of an element."""
        return builder().gep(self.address, [as_kind(index, "i64").llvm])


# A type checker takes operators from here: it can't see those that `_give_operators` adds.
_WithOperators: Any = object


class Value(_WithOperators):  # type: ignore[misc]
    """A vector of `count` numbers of a kind, or one number where `count` is 0.

    Operators take numbers too: these then stand in every lane, and get the vector's kind.
    """

    __slots__ = ("count", "kind", "llvm")

    def __init__(self, llvm: Any, kind: str, count: int = 0) -> None:
        self.llvm, self.kind, self.count = llvm, kind, count

    def __neg__(self) -> Value:
        if self.kind in REAL:
            return Value(builder().fneg(self.llvm), self.kind, self.count)
        return Value(builder().neg(self.llvm), self.kind, self.count)

    def __bool__(self) -> bool:
        raise TypeError("a formula can't branch on what it computes; it has `choose` and `branch`")


Operand = Value | int | float


def constant(number: float, kind: str, count: int = 0) -> Value:
    """A number that is known when a kernel is compiled."""
    number = float(number) if kind in REAL else int(number)
    kind_of_one = llvm_type(kind, 0)
    if not count:
        return Value(ir.Constant(kind_of_one, number), kind)
    return Value(ir.Constant(llvm_type(kind, count), [number] * count), kind, count)


def as_kind(given: Operand, kind: str, count: int = 0) -> Value:
    """A number or a vector as another kind; a number in every lane where `count` isn't 0."""
    if not isinstance(given, Value):
        return constant(given, kind, count)
    value = _converted(given, kind)
    return spread(value, count) if count and not value.count else value


def spread(value: Value, count: int) -> Value:
    """A vector with a number in every lane."""
    undefined = ir.Constant(llvm_type(value.kind, count), ir.Undefined)
    one = builder().insert_element(undefined, value.llvm, ir.Constant(I32, 0))
    order = ir.Constant(ir.VectorType(I32, count), [0] * count)
    return Value(builder().shuffle_vector(one, one, order), value.kind, count)


def _converted(value: Value, kind: str) -> Value:
    if kind == value.kind:
        return value
    target = llvm_type(kind, value.count)
    wider, unsigned = BITS[kind] - BITS[value.kind], value.kind in UNSIGNED
    if kind in REAL and value.kind in REAL:
        convert = builder().fpext if wider > 0 else builder().fptrunc
    elif kind in REAL:
        convert = builder().uitofp if unsigned else builder().sitofp
    elif value.kind in REAL:
        convert = builder().fptosi
    elif wider > 0:
        convert = builder().zext if unsigned else builder().sext
    else:
        convert = builder().trunc if wider else builder().bitcast
    return Value(convert(value.llvm, target), kind, value.count)


def alike(first: Operand, second: Operand) -> tuple[Value, Value]:
    """Two operands as vectors, or numbers, of the same kind and count."""
    leads = isinstance(first, Value) and (
        first.count > 0
        or not isinstance(second, Value)
        or (not second.count and _rank(first) >= _rank(second))
    )
    leading, other = (first, second) if leads else (second, first)
    assert isinstance(leading, Value)
    if isinstance(other, Value) and other.count not in (0, leading.count):
        raise TypeError(f"{leading.count} and {other.count} lanes don't go together")
    if isinstance(other, Value) and other.count and other.kind != leading.kind:
        raise TypeError(f"vectors of {leading.kind} and {other.kind} don't go together")
    fitting = as_kind(other, leading.kind, leading.count)
    return (leading, fitting) if leads else (fitting, leading)


def _rank(value: Value) -> tuple[bool, int]:
    return value.kind in REAL, BITS[value.kind]


def _whole(name: str) -> Callable[[Value, Value], Any]:
    return lambda first, second: getattr(builder(), name)(first.llvm, second.llvm)


def _arithmetic(name: str) -> Callable[[Value, Value], Any]:
    def emit(first: Value, second: Value) -> Any:
        whole_or_real = f"f{name}" if first.kind in REAL else name
        return getattr(builder(), whole_or_real)(first.llvm, second.llvm)

    return emit


def _shift_right(first: Value, second: Value) -> Any:
    shift = builder().lshr if first.kind in UNSIGNED else builder().ashr
    return shift(first.llvm, second.llvm)


def _comparison(sign: str) -> Callable[[Value, Value], Any]:
    def emit(first: Value, second: Value) -> Any:
        if first.kind in REAL:
            compare = builder().fcmp_unordered if sign == "!=" else builder().fcmp_ordered
            return compare(sign, first.llvm, second.llvm)
        compare = builder().icmp_unsigned if first.kind in UNSIGNED else builder().icmp_signed
        return compare(sign, first.llvm, second.llvm)

    return emit


# Python's operator, its methods' name, what it becomes, whether it compares
OPERATORS: tuple[tuple[Any, str, Callable[[Value, Value], Any], bool], ...] = (
    (operator.add, "add", _arithmetic("add"), False),
    (operator.sub, "sub", _arithmetic("sub"), False),
    (operator.mul, "mul", _arithmetic("mul"), False),
    (operator.truediv, "truediv", _whole("fdiv"), False),
    (operator.and_, "and", _whole("and_"), False),
    (operator.or_, "or", _whole("or_"), False),
    (operator.xor, "xor", _whole("xor"), False),
    (operator.lshift, "lshift", _whole("shl"), False),
    (operator.rshift, "rshift", _shift_right, False),
    (operator.lt, "lt", _comparison("<"), True),
    (operator.le, "le", _comparison("<="), True),
    (operator.gt, "gt", _comparison(">"), True),
    (operator.ge, "ge", _comparison(">="), True),
    (operator.eq, "eq", _comparison("=="), True),
    (operator.ne, "ne", _comparison("!="), True),
)


def _give_operators() -> None:
    for _, name, emit, compares in OPERATORS:

        def forward(
            first: Value, second: Operand, emit: Any = emit, mask: bool = compares
        ) -> Value:
            pair = alike(first, second)
            return Value(emit(*pair), "mask" if mask else pair[0].kind, pair[0].count)

        def backward(second: Value, first: Operand, forward: Any = forward) -> Value:
            result: Value = forward(*alike(first, second))
            return result

        setattr(Value, f"__{name}__", forward)
        if not compares:
            setattr(Value, f"__r{name}__", backward)


_give_operators()
