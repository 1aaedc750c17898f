"""Regular expressions with which users name matrices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gguf2st.errors import UsageError


def compiled(option: str, patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Expressions that an option was given. Raises `UsageError` for what is none."""
    expressions = []
    for pattern in patterns:
        try:
            expressions.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(
                f"{option} {pattern!r} isn't a regular expression ({error})."
            ) from error
    return expressions


def check_used(option: str, patterns: Sequence[re.Pattern[str]], names: Iterable[str]) -> None:
    """Raise `UsageError` for an expression that says nothing: it is mistyped."""
    for pattern in patterns:
        if not any(map(pattern.search, names)):
            raise UsageError(
                f"{option} {pattern.pattern!r} matches no matrix of this model; their names look like "
                f"{next(iter(names))}."
            )


def matches(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    """Whether any expression is found in a name."""
    return any(pattern.search(name) for pattern in patterns)
