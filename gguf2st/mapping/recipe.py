"""How output tensors come about."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf2st.errors import InputError
from gguf2st.mapping.table import Entry
from gguf2st.mapping.view import Source, View


@dataclass(frozen=True)
class Recipe:
    """How one output tensor comes about.

    `shape` is in torch order. `dtype` is "f32" where the tensor must keep it,
    else None. `fused` names the group of modules that an engine joins and that
    must share one quantization scheme. `priority` is the place of its class among those
    that gain most from more bits, 0 first; None for what the table doesn't list.
    `unquantized` says why the tensor is never quantized, and is None when it may be.
    `building` makes its view, beside others, at `position`.
    `experts` names the modules that a stacked tensor (expert, ...) becomes where a format
    stores them one by one, in the order of their rows, with "{expert}" for the number.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    component: str
    dtype: str | None
    unquantized: str | None
    fused: str | None
    priority: int | None
    experts: tuple[str, ...]
    operations: tuple[str, ...]
    building: Building
    position: int

    def view(self) -> View:
        """The rows and arithmetic that make the tensor; built anew, since row numbers take memory."""
        return views_of(self.building)[self.position]


@dataclass(frozen=True, eq=False)
class Building:
    """What is needed to make the views of one entry at one place."""

    path: Path
    entry: Entry
    names: dict[str, Any]
    sources: tuple[Source, ...]

    def views(self) -> list[View]:
        """Build them; `InputError` where the file doesn't fit the entry."""
        views = [View.of(self.sources, number) for number in range(len(self.sources))]
        by = self.entry.by
        try:
            for call in by:
                views = call.bind(self.names).apply(views)
        except (ValueError, IndexError, ZeroDivisionError) as error:
            shapes = ", ".join(f"{s.tensor.name} {s.tensor.shape}" for s in self.sources)
            raise InputError(
                f"{self.path}: {shapes} can't be rearranged by {' then '.join(c.source for c in by)} "
                f"({error}); the file doesn't fit its own keys, convert the original again."
            ) from error
        return views


# The experts of a block share one unstacking: building it for each would be quadratic.
# Few are kept, since row numbers of a large model would fill the memory.
@functools.lru_cache(maxsize=4)
def views_of(building: Building) -> list[View]:
    """The views of an entry at a place, in the order of its tensors."""
    return building.views()
