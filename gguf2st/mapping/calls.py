"""Operations as a mapping table writes them: a name with expressions as arguments."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from gguf2st.mapping import axes  # noqa: F401  # they register themselves
from gguf2st.mapping.expression import Expression, ExpressionError, parse
from gguf2st.mapping.operations import Operation


class OperationCall:
    """An operation as a table writes it, with expressions as arguments.

    Raises `ExpressionError` for an unknown operation or a wrong number of arguments.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        node = parse(source, "an operation")
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
            raise ExpressionError(f"{source!r} isn't an operation such as add(-1)")
        found = Operation.registry.get(node.func.id)
        if found is None or node.func.id.startswith("_"):
            known = ", ".join(sorted(n for n in Operation.registry if not n.startswith("_")))
            raise ExpressionError(f"there is no operation {node.func.id!r}; there are {known}")
        self._kind = found
        wanted = fields(found)  # type: ignore[arg-type]  # every operation is a dataclass
        needed = sum(field.default is MISSING for field in wanted)
        if not needed <= len(node.args) <= len(wanted):
            names = ", ".join(field.name for field in wanted)
            raise ExpressionError(
                f"{source!r} has {len(node.args)} arguments, not those of ({names})"
            )
        self._fields = wanted[: len(node.args)]
        try:
            parts = [ast.unparse(argument) for argument in node.args]
        except RecursionError as error:
            raise ExpressionError(f"{source!r} is nested too deeply") from error
        self._arguments: list[Expression | OperationCall] = [
            OperationCall(part) if field.type == "Operation" else Expression(part)
            for field, part in zip(self._fields, parts, strict=True)
        ]

    @property
    def names(self) -> frozenset[str]:
        """Free names of all arguments."""
        return frozenset().union(*(argument.names for argument in self._arguments))

    def bind(self, names: Mapping[str, Any]) -> Operation:
        """The operation with its arguments' values. Raises `ExpressionError` when one doesn't fit."""
        values = [
            argument.bind(names)
            if isinstance(argument, OperationCall)
            else argument.evaluate(names)
            for argument in self._arguments
        ]
        for field, value in zip(self._fields, values, strict=True):
            if not _fits(value, str(field.type)):
                raise ExpressionError(f"{field.name} of {self.source} is {value!r:.60}")
        return self._kind(*values)


def _fits(value: Any, annotation: str) -> bool:
    match annotation:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "list[int]":
            return isinstance(value, list) and all(_fits(item, "int") for item in value)
        case _:
            return isinstance(value, Operation)
