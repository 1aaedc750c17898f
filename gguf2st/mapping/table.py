"""A mapping table: which tensors become which, and what the configuration follows from.

Everything that is computed is an `Expression`: a table can't run code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf2st.mapping.calls import OperationCall
from gguf2st.mapping.expression import Expression, ExpressionError, Template
from gguf2st.mapping.folds import FoldRule

_PLACEHOLDER = re.compile(r"\{(layer|expert|kind)\}")
_PLACEHOLDERS = {
    "layer": r"(?P<layer>\d+)",
    "expert": r"(?P<expert>\d+)",
    "kind": r"(?P<kind>weight|bias)",
}


class Pattern:
    """A GGUF tensor name with {layer}, {expert} (numbers) or {kind} (weight or bias) in it."""

    def __init__(self, source: str) -> None:
        self.source = source
        pieces = _PLACEHOLDER.split(source)
        if any("{" in text or "}" in text for text in pieces[::2]):
            raise ExpressionError(f"{source!r} has a placeholder other than layer, expert and kind")
        self.placeholders = frozenset(pieces[1::2])
        if len(self.placeholders) != len(pieces[1::2]):
            raise ExpressionError(f"{source!r} names a placeholder twice")
        text = "".join(
            _PLACEHOLDERS[piece] if odd % 2 else re.escape(piece)
            for odd, piece in enumerate(pieces)
        )
        self._regex = re.compile(text)

    def match(self, name: str) -> dict[str, Any] | None:
        """What the placeholders stand for in `name`, or None."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        return {key: int(v) if key != "kind" else v for key, v in found.groupdict().items()}

    def fill(self, names: Mapping[str, Any]) -> str:
        """The tensor name with the placeholders filled in."""
        return _PLACEHOLDER.sub(lambda part: str(names[part[1]]), self.source)


@dataclass(frozen=True, eq=False)
class Entry:
    """One line of a table: source tensors -> output tensors, or a reasoned drop."""

    parts: tuple[Pattern, ...]
    to: tuple[Template, ...] = ()
    by: tuple[OperationCall, ...] = ()
    dtype: str | None = None
    when: Expression | None = None
    drop: str | None = None


@dataclass(frozen=True)
class Group:
    """Entries under one title, with a condition in common.

    Entries of an optional group needn't be in a file.
    """

    title: str
    entries: tuple[Entry, ...]
    when: Expression | None = None
    optional: bool = False
    component: str | None = None


@dataclass(frozen=True)
class Block:
    """The output prefix {B} of blocks for which a condition holds."""

    when: Expression
    prefix: Template
    component: str | None


@dataclass(frozen=True)
class Fields:
    """A part of a JSON file: fields computed from the GGUF, and constants of the architecture."""

    derived: dict[str, Expression] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Formats:
    """The quantized formats that the engines read of an architecture, where they don't read all.

    `variants` maps their names to the variant that it must be, `others` says why there are no more.
    """

    variants: dict[str, str]
    others: str


@dataclass(frozen=True)
class Table:
    """A validated mapping table."""

    name: str
    family: str
    differences: str
    architectures: tuple[str, ...]
    projectors: tuple[str, ...]
    component: str
    variables: dict[str, Expression]
    checks: dict[str, Expression]
    classes: dict[str, dict[str, Template]]
    blocks: tuple[Block, ...]
    groups: tuple[Group, ...]
    experts: dict[Template, tuple[Template, ...]]
    quantized: Formats | None
    fused: dict[str, tuple[Template, ...]]
    finer: dict[str, tuple[Template, ...]]
    unquantized: dict[str, str]
    folds: dict[str, FoldRule]
    config: Fields
    multimodal: Fields
    files: dict[str, Fields]
    accepts_projectors: tuple[str, ...]
    tokenizer: dict[str, Any]
