"""The named operations of mapping tables, each with its inverse: arithmetic and heads (more in axes.py).

An operation leads from the GGUF's arrangement to the Hugging Face one; it takes
the views of an entry and returns the views that go on. `inverse()` is what
llama.cpp's converter did. Operations on rows act on packed blocks of any type;
`View.acts_on_packed_rows` tells it for a concrete tensor.

A table calls an operation by the snake_case of its class name, with expressions
as arguments: `value_heads(key_heads, ratio, 128, 4096)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gguf2st.mapping.view import Indices, Values, View, arrange

Shapes = Sequence[tuple[int, ...]]


class Operation:
    """Base of all operations; a subclass registers itself under its snake_case name.

    With `named=False` it doesn't: a base of others.
    """

    registry: ClassVar[dict[str, type[Operation]]] = {}

    def __init_subclass__(cls, *, named: bool = True) -> None:
        if not named:
            return
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        Operation.registry[name] = cls

    def apply(self, views: Sequence[View]) -> list[View]:
        """The views that go on. Raises ValueError when the shapes don't fit."""
        raise NotImplementedError

    def inverse(self, shapes: Shapes) -> Operation:
        """The operation that undoes this one, for inputs of these shapes."""
        raise NotImplementedError


class Each(Operation, named=False):
    """Base of operations that treat each view alone."""

    def one(self, view: View) -> View:
        raise NotImplementedError

    def apply(self, views: Sequence[View]) -> list[View]:
        return [self.one(view) for view in views]


class Elementwise(Each, named=False):
    """Base of operations that compute each value from one value."""

    def compute(self, values: Values) -> Values:
        raise NotImplementedError

    def one(self, view: View) -> View:
        return view.apply(self.compute)


@dataclass(frozen=True)
class Add(Elementwise):
    """Add a constant; `add(-1)` undoes the "1 +" that the converter folds into a norm.

    Example: add(-1): [1.25, 0.5] -> [0.25, -0.5]
    """

    constant: float

    def compute(self, values: Values) -> Values:
        return values + np.float32(self.constant)

    def inverse(self, shapes: Shapes) -> Operation:
        return Add(-self.constant)


@dataclass(frozen=True)
class NegLog(Elementwise):
    """log(-x), which undoes the converter's -exp(A_log).

    Example: neg_log(): [-1.0, -7.389056] -> [0.0, 2.0]
    """

    def compute(self, values: Values) -> Values:
        if not (values < 0).all():
            raise ValueError("values of -exp(A_log) must all be below zero")
        return np.log(-values)

    def inverse(self, shapes: Shapes) -> Operation:
        return NegExp()


@dataclass(frozen=True)
class NegExp(Elementwise):
    """-exp(x), as the converter stores A_log.

    Example: neg_exp(): [0.0, 2.0] -> [-1.0, -7.389056]
    """

    def compute(self, values: Values) -> Values:
        return -np.exp(values)

    def inverse(self, shapes: Shapes) -> Operation:
        return NegLog()


@dataclass(frozen=True)
class RopeUnpermute(Each):
    """Rows of `heads` heads from interleaved rotary pairs back to two halves.

    The converter of the llama family interleaves the halves
    (`LlamaModel.permute`); this holds for weights and biases.

    Example: rope_unpermute(1): rows [0 1 2 3] -> [0 2 1 3]
    """

    heads: int

    def one(self, view: View) -> View:
        count = view.shape[0]
        return view.take(0, arrange(count, (self.heads, count // self.heads // 2, 2), (0, 2, 1)))

    def inverse(self, shapes: Shapes) -> Operation:
        return RopePermute(self.heads)


@dataclass(frozen=True)
class RopePermute(Each):
    """Rows of `heads` heads from two rotary halves to interleaved pairs.

    Example: rope_permute(1): rows [0 2 1 3] -> [0 1 2 3]
    """

    heads: int

    def one(self, view: View) -> View:
        count = view.shape[0]
        return view.take(0, arrange(count, (self.heads, 2, count // self.heads // 2), (0, 2, 1)))

    def inverse(self, shapes: Shapes) -> Operation:
        return RopeUnpermute(self.heads)


@dataclass(frozen=True)
class ValueHeads(Each):
    """Value heads of a gated delta net from tiled back to grouped order.

    Hugging Face keeps the `ratio` value heads of a key head together; the
    converter stores all first ones, then all second ones
    (`_LinearAttentionVReorderBase`). `axis` holds `offset` entries that stay,
    then ratio x key_heads x head_dim.

    Example: value_heads(2, 2, 1): [k0v0 k1v0 k0v1 k1v1] -> [k0v0 k0v1 k1v0 k1v1]
    """

    key_heads: int
    ratio: int
    head_dim: int
    offset: int = 0
    axis: int = 0

    def one(self, view: View) -> View:
        shape = (self.ratio, self.key_heads, self.head_dim)
        return view.take(self.axis, arrange(view.shape[self.axis], shape, (1, 0, 2), self.offset))

    def inverse(self, shapes: Shapes) -> Operation:
        # Seen from the grouped side the two counts swap roles.
        return ValueHeads(self.ratio, self.key_heads, self.head_dim, self.offset, self.axis)


@dataclass(frozen=True)
class GroupByKeyHead(Operation):
    """Interleave row blocks by key head: one tensor whose heads each hold a part of every input.

    Joins [all q; all k; all v] and [all z] to Qwen3-Next's fused projection,
    grouped as [q k v z] per key head.

    Example: group_by_key_head(2): [a0 a1], [b0 b1] -> [a0 b0 a1 b1]
    """

    key_heads: int

    def apply(self, views: Sequence[View]) -> list[View]:
        expect_alike(views)
        parts = [_rows_by_head(view, self.key_heads) for view in views]
        return [views[0].with_rows(np.concatenate(parts, 1).reshape(-1))]

    def inverse(self, shapes: Shapes) -> Operation:
        return SplitByKeyHead(self.key_heads, [shape[0] for shape in shapes])


@dataclass(frozen=True)
class SplitByKeyHead(Operation):
    """Take apart rows that are interleaved by key head; `sizes` are the rows of each part.

    Example: split_by_key_head(2, [2, 2]): [a0 b0 a1 b1] -> [a0 a1], [b0 b1]
    """

    key_heads: int
    sizes: list[int]

    def apply(self, views: Sequence[View]) -> list[View]:
        (view,) = views
        if any(size % self.key_heads for size in self.sizes):
            raise ValueError(f"rows of {self.sizes} don't belong to {self.key_heads} heads")
        cuts = edges(view.shape[0], self.sizes) // self.key_heads
        parts = np.split(_rows_by_head(view, self.key_heads), cuts, 1)
        return [view.with_rows(part.reshape(-1)) for part in parts]

    def inverse(self, shapes: Shapes) -> Operation:
        return GroupByKeyHead(self.key_heads)


@dataclass(frozen=True)
class At(Operation):
    """Apply an operation to one of several tensors only, or to `count` consecutive ones.

    Example: at(0, rope_unpermute(1)): [0 1 2 3], [4] -> [0 2 1 3], [4]
    """

    position: int
    operation: Operation
    count: int = 1

    def apply(self, views: Sequence[View]) -> list[View]:
        end = self.position + self.count
        if not 0 <= self.position < end <= len(views):
            raise ValueError(f"of {len(views)} tensors none is number {self.position} to {end - 1}")
        made = self.operation.apply(views[self.position : end])
        return [*views[: self.position], *made, *views[end:]]

    def inverse(self, shapes: Shapes) -> Operation:
        chosen = shapes[self.position : self.position + self.count]
        blank = [View((), np.zeros(shape[:-1], np.int64), shape[-1]) for shape in chosen]
        made = len(self.operation.apply(blank))
        return At(self.position, self.operation.inverse(chosen), made)


def _rows_by_head(view: View, heads: int) -> Indices:
    if view.rows.ndim != 1:
        raise ValueError(f"shape {view.shape} isn't a matrix")
    return view.rows.reshape(heads, -1)


def edges(extent: int, sizes: list[int]) -> Indices:
    """Where the pieces after the first begin."""
    if extent != sum(sizes) or min(sizes) < 1:
        raise ValueError(f"{extent} entries can't be cut into {sizes}")
    return np.cumsum(sizes)[:-1]


def expect_alike(views: Sequence[View]) -> None:
    """Raise ValueError for tensors that can't become one: other widths, columns or arithmetic."""
    first = views[0]
    if any(
        view.width != first.width
        or view.columns is not first.columns
        or view.functions != first.functions
        or view.transposed
        for view in views
    ):
        raise ValueError(f"tensors of shapes {[view.shape for view in views]} can't be joined")
