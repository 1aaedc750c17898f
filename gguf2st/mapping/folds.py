"""Where the scale of an activation may move: from the matrices that read it to what writes it.

A column of every reader multiplied by s, and the channel of the writer divided by it, leave the model's
function as it is. Which writers and readers there are is declared in an architecture's table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf2st.mapping.expression import Expression, Template


@dataclass(frozen=True)
class FoldRule:
    """One line of a table's [fold]: a writer, all its readers, and how their channels correspond.

    `added` is what the model adds to the writer's stored weight (1 for norms of Gemma).
    `heads` is the number of heads of the writer, each of which feeds as many heads of the
    readers; without it, channels and columns are the same.
    """

    writer: Template
    readers: tuple[Template, ...]
    added: float = 0.0
    heads: Expression | None = None


@dataclass(frozen=True)
class Fold:
    """A rule at one place; writer and readers are modules' names without leaf.

    Not every reader needs to be in the model: a block has one kind of attention.
    """

    writer: str
    readers: tuple[str, ...]
    added: float
    heads: int | None


def folds_of(
    rules: Mapping[str, FoldRule], names: Mapping[str, Any], experts: int
) -> Iterator[Fold]:
    """The folds of one block, whose `names` include {B}. A writer inside an expert has readers there."""
    for rule in rules.values():
        heads = None if rule.heads is None else int(rule.heads.evaluate(names))
        for number in range(experts) if "expert" in rule.writer.names else (None,):
            inside = names if number is None else {**names, "expert": number}
            readers = tuple(
                name for template in rule.readers for name in _filled(template, inside, experts)
            )
            yield Fold(rule.writer.fill(inside), readers, rule.added, heads)


def _filled(template: Template, names: Mapping[str, Any], experts: int) -> Iterator[str]:
    if "expert" in template.names and "expert" not in names:
        for number in range(experts):
            yield template.fill({**names, "expert": number})
    else:
        yield template.fill(names)
