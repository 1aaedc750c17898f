"""The small expression language of mapping tables.

An expression looks like Python and has numbers, strings, lists, arithmetic,
comparisons, conditions, one-line list comprehensions, indexing, and calls of
the functions that the caller hands in. It has no attributes, no assignment and
no way to reach anything else, and each evaluation has a budget of steps and of
sizes, so that a stranger's table can't run code, read files or hang.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

MAXIMUM_LENGTH = 1_000  # characters of one expression
MAXIMUM_STEPS = 200_000  # nodes visited, and items made or looked through, by one evaluation
FUNCTION_STEPS = 100  # what a call of a caller's function counts for
MAXIMUM_ITEMS = 100_000  # items of any list or characters of any string
MAXIMUM_INTEGER = 1 << 63
_MISSING = object()


class ExpressionError(ValueError):
    """The expression isn't allowed, or can't be evaluated; the message says why."""


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def _range(*bounds: int) -> list[int]:
    numbers = range(*bounds)
    if numbers[MAXIMUM_ITEMS:]:
        raise ExpressionError(f"a range of more than {MAXIMUM_ITEMS} items is too long")
    return list(numbers)


def _text(value: Any) -> str:
    # The text of a list that holds one long text many times would fill the memory.
    if not isinstance(value, str | int | float | None):
        raise ExpressionError(f"a {type(value).__name__} has no text")
    return str(value)


def _sum(items: list[Any]) -> Any:
    return sum(items)  # without the start of sum(), with which it joins lists


def _round(number: Any) -> Any:
    return round(number)  # without the digits of round(): before the point they may cost hours


def _index(items: Any, item: Any) -> int:
    if not isinstance(items, list):
        raise ExpressionError("index looks through a list")
    return items.index(item)


def _starts_with(text: Any, prefix: Any) -> bool:
    if not isinstance(text, str):
        raise ExpressionError("starts_with looks at a text")
    return text.startswith(prefix)


BUILTINS: dict[str, Callable[..., Any]] = {
    "len": len,
    "range": _range,
    "min": min,
    "max": max,
    "sum": _sum,
    "any": any,
    "all": all,
    "int": int,
    "str": _text,
    "round": _round,
    "index": _index,
    "starts_with": _starts_with,
}


def parse(source: str, what: str) -> ast.expr:
    """Syntax tree of a line of a table, not checked yet.

    Raises `ExpressionError` for what isn't a text, is too long or has no tree.
    """
    if not isinstance(source, str):
        raise ExpressionError(f"{source!r:.60} isn't a text")
    if len(source) > MAXIMUM_LENGTH:
        raise ExpressionError(f"longer than {MAXIMUM_LENGTH} characters")
    try:
        return ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError(f"{source!r} isn't {what} ({error})") from error


class Expression:
    """A checked expression, ready to be evaluated many times.

    Raises `ExpressionError` when the source uses anything outside the language.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._body = parse(source, "an expression")
        self.names = _check(self._body)

    def __repr__(self) -> str:
        return f"Expression({self.source!r})"

    def evaluate(self, names: Mapping[str, Any]) -> Any:
        """Value with `names` (variables and functions) in reach.

        Raises `ExpressionError` for an unknown name, an impossible operation or
        an exhausted budget; errors raised by the caller's functions pass through.
        """
        try:
            return _Evaluation(names).value(self._body)
        except (
            TypeError,
            LookupError,
            ArithmeticError,
            ValueError,
            RecursionError,
        ) as error:
            if isinstance(error, ExpressionError):
                raise
            raise ExpressionError(f"{self.source!r} can't be evaluated: {error}") from error


def _check(body: ast.expr) -> frozenset[str]:
    """Refuse every node outside the language; return the free names."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(body):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name):
                bound.add(name)
            case ast.Constant(value=value) if isinstance(value, int | float | str | None):
                pass
            case ast.Call(func=ast.Name(), keywords=[]):
                pass
            case ast.ListComp(generators=[ast.comprehension(target=ast.Name(), is_async=0)]):
                pass
            case (
                ast.BinOp()
                | ast.UnaryOp()
                | ast.BoolOp()
                | ast.Compare()
                | ast.IfExp()
                | ast.Subscript()
                | ast.Slice()
                | ast.List()
                | ast.Tuple()
                | ast.comprehension()
                | ast.expr_context()
                | ast.boolop()
            ):
                pass
            case ast.operator() | ast.unaryop() | ast.cmpop() if (
                type(node) in _BINARY or type(node) in _UNARY or type(node) in _COMPARE
            ):
                pass
            case _:
                raise ExpressionError(f"{type(node).__name__} isn't part of the language")
    return frozenset(used - bound)


class _Evaluation:
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names: dict[str, Any] = {**BUILTINS, **names}
        self._steps = 0

    def value(self, node: ast.expr) -> Any:
        self._spend(1)
        result = self._dispatch(node)
        if isinstance(result, list | str) and not isinstance(node, ast.Name):
            if len(result) > MAXIMUM_ITEMS:
                raise ExpressionError(f"a value of {len(result)} items is too long")
            self._spend(len(result))
        if isinstance(result, int) and abs(result) > MAXIMUM_INTEGER:
            raise ExpressionError("an integer beyond 64 bits")
        return result

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAXIMUM_STEPS:
            raise ExpressionError(f"more than {MAXIMUM_STEPS} steps")

    def _look_through(self, *values: Any) -> None:
        self._spend(sum(len(value) for value in values if isinstance(value, list | str)))

    def _dispatch(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                found = self._names.get(name, _MISSING)
                if found is _MISSING:
                    raise ExpressionError(f"the name {name!r} isn't known")
                return found
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(type(op), self.value(left), self.value(right))
            case ast.UnaryOp(op=op, operand=operand):
                return _UNARY[type(op)](self.value(operand))
            case ast.BoolOp(op=op, values=values):
                result = None
                for part in values:
                    result = self.value(part)
                    if bool(result) == isinstance(op, ast.Or):
                        break
                return result
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compare(left, ops, comparators)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body) if self.value(test) else self.value(orelse)
            case ast.Subscript(value=value, slice=index):
                return self.value(value)[self._index(index)]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._item(item) for item in items]
            case ast.ListComp(elt=item, generators=[generator]):
                return self._comprehension(item, generator)
            case ast.Call(func=ast.Name(id=name), args=arguments):
                function = self._names.get(name)
                if not callable(function):
                    raise ExpressionError(f"there is no function {name!r}")
                values = [self.value(argument) for argument in arguments]
                self._look_through(*values)
                if name not in BUILTINS or function is not BUILTINS[name]:
                    self._spend(FUNCTION_STEPS)
                return function(*values)
        raise ExpressionError(f"{type(node).__name__} isn't part of the language")

    def _item(self, node: ast.expr) -> Any:
        value = self.value(node)
        # Lists of lists of lists could hold more than the budgets of steps and items allow.
        if isinstance(value, list):
            raise ExpressionError("a list can't hold lists")
        return value

    @staticmethod
    def _binary(op: type[ast.operator], left: Any, right: Any) -> Any:
        if op is ast.Mult:
            for items, times in ((left, right), (right, left)):
                # Checked before it is built: "x" * 10**9 would fill the memory first.
                if (
                    isinstance(items, list | str)
                    and len(items) * max(int(times), 0) > MAXIMUM_ITEMS
                ):
                    raise ExpressionError("a repetition is too long")
        if op is ast.Mod and isinstance(left, str):
            raise ExpressionError("% formats no text here")
        return _BINARY[op](left, right)

    def _compare(self, left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr]) -> bool:
        value = self.value(left)
        for op, other in zip(ops, others, strict=True):
            right = self.value(other)
            self._look_through(value, right)
            if not _COMPARE[type(op)](value, right):
                return False
            value = right
        return True

    def _index(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Slice):
            parts = (node.lower, node.upper, node.step)
            return slice(*(None if part is None else self.value(part) for part in parts))
        return self.value(node)

    def _comprehension(self, item: ast.expr, generator: ast.comprehension) -> list[Any]:
        name = generator.target.id  # type: ignore[attr-defined]  # _check allows only a Name
        hidden = self._names.get(name, _MISSING)
        result = []
        for element in self.value(generator.iter):
            self._names[name] = element
            if all(self.value(condition) for condition in generator.ifs):
                result.append(self._item(item))
        self._names[name] = hidden
        return result


class Template:
    """Text with expressions in braces: "{P}layers.{layer}.mlp.gate.weight"."""

    _PART = re.compile(r"\{([^{}]*)\}")

    def __init__(self, source: str) -> None:
        self.source = source
        if not isinstance(source, str):
            raise ExpressionError(f"{source!r:.60} isn't a text")
        pieces = self._PART.split(source)
        if any("{" in text or "}" in text for text in pieces[::2]):
            raise ExpressionError(f"the braces of {source!r} don't match")
        self._texts = pieces[::2]
        self._expressions = [Expression(part) for part in pieces[1::2]]
        self.names = frozenset().union(*(part.names for part in self._expressions))

    def __repr__(self) -> str:
        return f"Template({self.source!r})"

    def fill(self, names: Mapping[str, Any]) -> str:
        """The text with each expression's value in place."""
        if not self._expressions:
            return self.source
        values = [_text(part.evaluate(names)) for part in self._expressions]
        return "".join(a + b for a, b in zip(self._texts, [*values, ""], strict=True))
