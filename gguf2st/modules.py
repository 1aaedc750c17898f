"""Matrices that a format may quantize: one for each linear layer and each expert."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gguf2st.mapping import Recipe
from gguf2st.mapping.view import SOURCE_SHIFT, Source, View
from gguf2st.scheme import Scheme
from gguf2st.targets.names import is_expert, under_one_scale


@dataclass(frozen=True)
class Module:
    """A matrix of shape (out, in), named without its leaf ("model.layers.0.mlp.down_proj").

    It is a whole recipe, or rows of one expert of a stacked recipe: then `expert`
    is its number and `part` the place among `parts` equal pieces of its rows. A format
    may also keep a stack: then `experts` is their number and `shape` the one of each.
    """

    name: str
    shape: tuple[int, int]
    recipe: Recipe
    expert: int | None = None
    part: int = 0
    parts: int = 1
    experts: int = 0

    @property
    def fused(self) -> str | None:
        """The group of modules that must share one scheme."""
        return self.recipe.fused

    def view(self) -> View:
        """Rows of this module alone, never transposed."""
        view = self.recipe.view()
        if self.experts:
            return replace(view, transposed=False)
        if self.expert is None:
            return view
        # A stacked matrix that is stored transposed is an ordinary one when it stands alone.
        rows = view.rows[self.expert].reshape(self.parts, -1)[self.part]
        return replace(view, rows=rows, transposed=False)

    def block_types(self) -> frozenset[str]:
        """GGUF types of its blocks; none when the values aren't those of the file.

        Columns may have moved, but only 128 at a time, so that groups stay groups.
        """
        view = self.view()
        if view.functions:
            return frozenset()
        if view.columns is not None:
            runs = view.columns.reshape(-1, 128) if view.width % 128 == 0 else None
            if runs is None or (runs[:, 0] % 128).any() or (np.diff(runs, axis=1) != 1).any():
                return frozenset()
        return self.stored_types()

    def stored_types(self) -> frozenset[str]:
        """GGUF types of its blocks, whatever becomes of them."""
        view = self.view()
        used = np.unique(view.rows >> SOURCE_SHIFT)
        return frozenset(view.sources[number].tensor.kind.name for number in used)

    def source(self) -> Source:
        """The GGUF tensor that the module's first row comes from."""
        view = self.view()
        return view.sources[int(view.rows.reshape(-1)[0]) >> SOURCE_SHIFT]


def scale_group(module: Module) -> str:
    """What modules have in common that share a scale for whole matrices.

    All experts of a block are one group of the table, but each is a matrix of its own.
    """
    if is_expert(module.name):
        return under_one_scale(module.name)
    return module.fused or module.name


def block_factor(modules: Iterable[Module], kind: str) -> float | None:
    """What the values of all blocks of these modules are multiplied with.

    None unless all are blocks of GGUF type `kind`, as they lie in the file or moved as a
    whole, with one factor, positive and finite, for all of them: then they can't be kept
    under one global scale.
    """
    factors: set[float] = set()
    for module in modules:
        view = module.view()
        found = view.packed_type()
        if found is None or found.name != kind:
            return None
        factors |= view.factors()
        if len(factors) > 1:
            return None
    return next((factor for factor in factors if 0 < factor < math.inf), None)


def modules_of(recipe: Recipe) -> list[Module]:
    """The matrices of a recipe; none for a tensor that isn't a linear layer's weight."""
    if recipe.experts == (recipe.name,):
        view = recipe.view()
        count, rows = view.rows.shape
        return [Module(recipe.name, (rows, view.width), recipe, experts=count)]
    if recipe.experts:
        return list(_unstacked(recipe))
    if len(recipe.shape) == 2 and recipe.name.endswith(".weight"):
        out, columns = recipe.shape
        return [Module(recipe.name.removesuffix(".weight"), (out, columns), recipe)]
    return []


def _unstacked(recipe: Recipe) -> Iterator[Module]:
    view = recipe.view()
    count, rows, columns = (*view.rows.shape, view.width)
    parts = len(recipe.experts)
    for expert in range(count):
        for part, pattern in enumerate(recipe.experts):
            name = pattern.replace("{expert}", str(expert))
            yield Module(name, (rows // parts, columns), recipe, expert, part, parts)


def importance_of(
    module: Module, importance: Mapping[str, npt.NDArray[np.float32]], expert: int = 0
) -> npt.NDArray[np.float32] | None:
    """Weights of the module's columns, float32 of shape (in,), or None when the matrix has none.

    `importance` maps GGUF tensor names to (columns,) or (experts, columns); old files
    have the experts one after the other, (experts * columns,). An expert that no token
    reached while it was measured has none.
    `expert` is the one that is meant of a stack.
    """
    view = module.view()
    first = int(view.rows.reshape(-1)[expert * module.shape[0]])
    tensor = view.sources[first >> SOURCE_SHIFT].tensor
    weights = importance.get(tensor.name)
    if weights is None or weights.size % tensor.columns:
        return None
    if weights.ndim > 1 and weights.shape[-1] != tensor.columns:  # of other experts' shape
        return None
    by_expert = weights.reshape(-1, tensor.columns)
    if len(by_expert) not in (1, *tensor.shape[:-2]):
        return None
    row = first & ((1 << SOURCE_SHIFT) - 1)
    mine: npt.NDArray[np.float32] = by_expert[row // (tensor.row_count // len(by_expert))]
    # Of an expert that never ran, llama.cpp's old format says 1 everywhere.
    if not mine.any() or (len(by_expert) > 1 and (mine == 1).all()):
        return None
    return mine if view.columns is None else mine[view.columns]


def keeps_blocks(group: Sequence[Module], scheme: Scheme) -> bool:
    """Whether blocks of all these modules can be kept, with the same factor where a scale is shared."""
    sharing: dict[str, list[Module]] = {}
    for module in group:
        sharing.setdefault(scale_group(module), []).append(module)
    return all(block_factor(modules, scheme.same_blocks) for modules in sharing.values())
