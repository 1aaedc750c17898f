"""Activation-aware scaling: columns that matter are made large before they are rounded.

What AWQ does with activations (arXiv:2306.00978), done with an importance matrix alone: E[x^2] of each
column says how large its activations are. Each reader's column is multiplied by s = sqrt(E[x^2])^exponent
and its writer's channel is divided by s, so the model computes what it did, and the columns with the
largest activations lose least. Nothing is read but the importance matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array, beside
from gguf2st.errors import UnsupportedError
from gguf2st.mapping import Recipe, Resolution
from gguf2st.mapping.folds import Fold
from gguf2st.modules import Module, importance_of, modules_of

# Between 0.2 and 0.4 the loss is flat, and an exponent of each layer's own brings nothing more.
EXPONENT = 0.35
# Of a column's mean; keeps columns that never saw an activation from being scaled without bound.
SMALLEST = 1e-6

Scales = npt.NDArray[np.float32]
Importance = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Change:
    """What happens to a matrix (out, in), or to a vector of `rows` values.

    Columns are multiplied by `columns`, rows divided by `rows`. The model adds `added` to a
    stored value before using it.
    """

    columns: Scales | None = None
    rows: Scales | None = None
    added: float = 0.0


class Folding:
    """All scales that move, by the tensors that they change.

    `folds` counts the places, `unmeasured` names readers without importance, whose folds are left out.
    """

    def __init__(self) -> None:
        self.folds = 0
        self.unmeasured: list[str] = []
        self._changes: dict[str, list[Change]] = {}

    def column_scales(self, module: str) -> Scales | None:
        """What the columns of a module are multiplied with, float32 (in,), or None."""
        found = [
            c.columns for c in self._changes.get(f"{module}.weight", ()) if c.columns is not None
        ]
        return found[0] if found else None

    def apply_to_module(self, module: Module, start: int, values: Array) -> None:
        """Change rows from `start` on of a matrix, in place."""
        for change in self._changes.get(f"{module.name}.weight", ()):
            _scale(values, change, start)

    def changes_module(self, module: Module) -> bool:
        """Whether `apply_to_module` may change a matrix."""
        return f"{module.name}.weight" in self._changes

    def changes(self, recipe: Recipe) -> bool:
        """Whether `apply` may change a tensor."""
        return bool(self._changes) and (bool(recipe.experts) or recipe.name in self._changes)

    def apply(self, recipe: Recipe, start: int, values: Array) -> None:
        """Change rows from `start` on of a tensor as it is written unquantized, in place."""
        if recipe.experts:
            self._apply_to_experts(recipe, start, values)
            return
        for change in self._changes.get(recipe.name, ()):
            if len(recipe.shape) == 1 and change.rows is not None:
                values += change.added
                values /= beside(values, change.rows)
                values -= change.added
                continue
            _scale(values, change, start)

    def _apply_to_experts(self, recipe: Recipe, start: int, values: Array) -> None:
        if not self._changes:
            return
        modules = modules_of(recipe)
        transposed = recipe.view().transposed
        height = recipe.shape[-2]
        for module in modules:
            changes = self._changes.get(f"{module.name}.weight")
            if not changes:
                continue
            out, _ = module.shape
            first = 0 if module.expert is None else module.expert * height
            part = slice(module.part * out, (module.part + 1) * out)
            # Rows of the module's expert that lie in this piece.
            low, high = max(start, first), min(start + len(values), first + height)
            if low >= high:
                continue
            mine, within = values[low - start : high - start], slice(low - first, high - first)
            for change in changes:
                if transposed:
                    if change.columns is not None:
                        mine[:, part] *= beside(values, change.columns[within, None])
                    if change.rows is not None:
                        mine[:, part] /= beside(values, change.rows)
                    continue
                top, bottom = max(within.start, part.start), min(within.stop, part.stop)
                if top < bottom:
                    piece = mine[top - within.start : bottom - within.start]
                    _scale(piece, change, top - part.start)

    def _add(self, name: str, change: Change) -> None:
        self._changes.setdefault(name, []).append(change)


def _scale(values: Array, change: Change, start: int) -> None:
    if change.columns is not None:
        values *= beside(values, change.columns)
    if change.rows is not None:
        values /= beside(values, change.rows[start : start + len(values), None])


def fold_scales(
    resolution: Resolution,
    importance: Importance,
    exponent: float,
    quantized: Collection[str] | None = None,
    untouched: Collection[str] = (),
) -> Folding:
    """Scales for every fold of a model that has a `quantized` reader (all folds when None).

    Those with an `untouched` reader are left out. Raises `UnsupportedError` when a table's fold
    doesn't fit its tensors.
    """
    folding = Folding()
    if not exponent:
        return folding
    recipes = {recipe.name: recipe for recipe in resolution.recipes}
    modules = {m.name: m for recipe in resolution.recipes for m in modules_of(recipe)}
    for fold in resolution.folds:
        readers = [modules[name] for name in fold.readers if name in modules]
        written = [name for name in _tensors_of(fold.writer) if name in recipes]
        matrix = modules.get(fold.writer)
        if not readers or not (written or matrix):
            continue
        if quantized is not None and not any(reader.name in quantized for reader in readers):
            continue
        if any(reader.name in untouched for reader in readers):
            continue
        width = matrix.shape[0] if matrix else recipes[written[0]].shape[-1]
        channels = _channels(fold, width, readers)
        squares = _mean_squares(readers, importance)
        if squares is None:
            folding.unmeasured.append(readers[0].name)
            continue
        scales = _scales(squares, channels, width, exponent)
        folding.folds += 1
        for name in dict.fromkeys([*written, *([f"{fold.writer}.weight"] if matrix else [])]):
            folding._add(name, Change(rows=scales, added=fold.added))
        for reader in readers:
            folding._add(f"{reader.name}.weight", Change(columns=scales[channels]))
    return folding


def _tensors_of(writer: str) -> Iterator[str]:
    yield f"{writer}.weight"
    yield f"{writer}.bias"


def _channels(fold: Fold, width: int, readers: Iterable[Module]) -> npt.NDArray[np.int64]:
    """For each column of a reader, the channel of the writer that it reads, (in,)."""
    sizes = {reader.shape[1] for reader in readers}
    heads = fold.heads or 1
    (columns,) = sizes if len(sizes) == 1 else (0,)
    if not columns or columns % width or width % heads or (fold.heads is None and columns != width):
        raise UnsupportedError(
            f"the mapping table folds {fold.writer} ({width} channels) into matrices of "
            f"{', '.join(map(str, sorted(sizes)))} columns, which don't fit; convert with --smoothing 0."
        )
    head = width // heads
    index = np.arange(columns)
    return index // head // (columns // width) * head + index % head


def _mean_squares(readers: Iterable[Module], importance: Importance) -> Scales | None:
    """E[x^2] of what the readers read, (in,).

    All read the same, but an expert reads it for some tokens only: those are asked last,
    and then all of them.
    """
    experts = []
    for reader in readers:
        found = importance_of(reader, importance)
        if found is not None and ".experts." not in reader.name:
            return found
        if found is not None:
            experts.append(found)
    return np.mean(experts, axis=0, dtype=np.float32) if experts else None


def _scales(
    squares: Scales, channels: npt.NDArray[np.int64], width: int, exponent: float
) -> Scales:
    """sqrt(E[x^2])^exponent of each channel (width,), around 1."""
    sums = np.bincount(channels, weights=squares, minlength=width)
    means = sums / np.maximum(np.bincount(channels, minlength=width), 1)
    if not means.any():
        return np.ones(width, np.float32)
    logarithms = np.log(np.maximum(means, SMALLEST * means.mean())) * (exponent / 2)
    middle = (logarithms.max() + logarithms.min()) / 2
    scales: Scales = np.exp(logarithms - middle).astype(np.float32)
    return scales
