"""The named operations of mapping tables on whole axes: join, cut, alternate, transpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gguf2st.mapping.operations import Each, Operation, Shapes, edges, expect_alike
from gguf2st.mapping.view import SOURCE_SHIFT, View


@dataclass(frozen=True)
class Cat(Operation):
    """Join all tensors along an axis; along the last one, only pieces of the same rows.

    Example: cat(0): [a b], [c] -> [a b c]
    """

    axis: int

    def apply(self, views: Sequence[View]) -> list[View]:
        if self.axis == views[0].rows.ndim:
            return [_side_by_side(views)]
        expect_alike(views)
        axis = _before_last(views[0], self.axis)
        return [views[0].with_rows(np.concatenate([view.rows for view in views], axis))]

    def inverse(self, shapes: Shapes) -> Operation:
        return Split(self.axis, [shape[self.axis] for shape in shapes])


@dataclass(frozen=True)
class Split(Operation):
    """Cut one tensor into pieces of the given sizes along an axis.

    Example: split(0, [2, 1]): [a b c] -> [a b], [c]
    """

    axis: int
    sizes: list[int]

    def apply(self, views: Sequence[View]) -> list[View]:
        (view,) = views
        if self.axis == view.rows.ndim:
            pieces = np.split(np.arange(view.width), edges(view.width, self.sizes))
            return [view.take(self.axis, piece) for piece in pieces]
        axis = _before_last(view, self.axis)
        cuts = edges(view.shape[axis], self.sizes)
        return [view.with_rows(part) for part in np.split(view.rows, cuts, axis)]

    def inverse(self, shapes: Shapes) -> Operation:
        return Cat(self.axis)


@dataclass(frozen=True)
class Stack(Operation):
    """Join tensors along a new axis before the last.

    Example: stack(0): [a b], [c d] -> [[a b] [c d]]
    """

    axis: int

    def apply(self, views: Sequence[View]) -> list[View]:
        expect_alike(views)
        axis = _before_last(views[0], self.axis, new=True)
        return [views[0].with_rows(np.stack([view.rows for view in views], axis))]

    def inverse(self, shapes: Shapes) -> Operation:
        return Unstack(self.axis)


@dataclass(frozen=True)
class Unstack(Operation):
    """Take an axis apart: one tensor for each of its entries (experts).

    Example: unstack(0): [[a b] [c d]] -> [a b], [c d]
    """

    axis: int

    def apply(self, views: Sequence[View]) -> list[View]:
        (view,) = views
        axis = _before_last(view, self.axis)
        return [view.with_rows(part) for part in np.moveaxis(view.rows, axis, 0)]

    def inverse(self, shapes: Shapes) -> Operation:
        return Stack(self.axis)


@dataclass(frozen=True)
class Unsqueeze(Each):
    """Insert an axis of extent 1 before the last.

    Example: unsqueeze(1): shape (6, 4) -> (6, 1, 4)
    """

    axis: int

    def one(self, view: View) -> View:
        return view.with_rows(np.expand_dims(view.rows, _before_last(view, self.axis, new=True)))

    def inverse(self, shapes: Shapes) -> Operation:
        return Squeeze(self.axis)


@dataclass(frozen=True)
class Squeeze(Each):
    """Remove an axis of extent 1 before the last.

    Example: squeeze(1): shape (6, 1, 4) -> (6, 4)
    """

    axis: int

    def one(self, view: View) -> View:
        return view.with_rows(np.squeeze(view.rows, _before_last(view, self.axis)))

    def inverse(self, shapes: Shapes) -> Operation:
        return Unsqueeze(self.axis)


@dataclass(frozen=True)
class AsMatrix(Each):
    """Give a vector back its first axis of extent 1, which llama-quantize drops; a matrix stays.

    Example: as_matrix(): shape (64,) -> (1, 64)
    """

    def one(self, view: View) -> View:
        return view if view.rows.ndim else view.with_rows(view.rows.reshape(1))

    def inverse(self, shapes: Shapes) -> Operation:
        return Squeeze(0) if len(shapes[0]) == 1 else self


@dataclass(frozen=True)
class Transpose(Each):
    """Swap the last two axes; only arithmetic may follow.

    Example: transpose(): shape (8, 64, 32) -> (8, 32, 64)
    """

    def one(self, view: View) -> View:
        if not view.rows.ndim:
            raise ValueError(f"shape {view.shape} can't be transposed")
        return replace(view, transposed=not view.transposed)

    def inverse(self, shapes: Shapes) -> Operation:
        return Transpose()


@dataclass(frozen=True)
class Interleave(Operation):
    """Alternate the rows of two or more tensors.

    Example: interleave(): [a0 a1], [b0 b1] -> [a0 b0 a1 b1]
    """

    def apply(self, views: Sequence[View]) -> list[View]:
        expect_alike(views)
        _expect_rows(views[0])
        rows = np.stack([view.rows for view in views], -1)
        return [views[0].with_rows(rows.reshape(*rows.shape[:-2], -1))]

    def inverse(self, shapes: Shapes) -> Operation:
        return Deinterleave(len(shapes))


@dataclass(frozen=True)
class Deinterleave(Operation):
    """Every `count`-th row of one tensor, as `count` tensors.

    Example: deinterleave(2): [a0 b0 a1 b1] -> [a0 a1], [b0 b1]
    """

    count: int

    def apply(self, views: Sequence[View]) -> list[View]:
        (view,) = views
        _expect_rows(view)
        count = view.rows.shape[-1]
        if self.count < 1 or count % self.count:
            raise ValueError(f"{count} rows can't be dealt out to {self.count} tensors")
        return [view.with_rows(view.rows[..., k :: self.count]) for k in range(self.count)]

    def inverse(self, shapes: Shapes) -> Operation:
        return Interleave()


@dataclass(frozen=True)
class ByElement(Each):
    """Treat every element of an unquantized tensor as a row of its own.

    Example: by_element(): shape (4, 64) -> (4, 64, 1)
    """

    def one(self, view: View) -> View:
        if view.single:
            return replace(view, single=False)
        sources = tuple(
            replace(source, tensor=replace(source.tensor, shape=(*source.tensor.shape, 1)))
            for source in view.sources
        )
        if view.columns is not None or any(s.tensor.kind.block_size > 1 for s in sources):
            raise ValueError("only unquantized tensors in their own order have single elements")
        number = int(view.rows.reshape(-1)[0]) >> SOURCE_SHIFT
        return replace(View.of(sources, number), functions=view.functions)

    def inverse(self, shapes: Shapes) -> Operation:
        return JoinElements()


@dataclass(frozen=True)
class JoinElements(Each):
    """Give single elements their axis back; nothing may follow.

    Example: join_elements(): shape (4, 64, 1) -> (4, 64)
    """

    def one(self, view: View) -> View:
        if view.width != 1:
            raise ValueError(f"rows of {view.width} elements aren't single elements")
        return replace(view, single=True)

    def inverse(self, shapes: Shapes) -> Operation:
        return ByElement()


def _before_last(view: View, axis: int, *, new: bool = False) -> int:
    """The axis, if it lies before the last one (or may be inserted there)."""
    if not 0 <= axis < view.rows.ndim + new:
        raise ValueError(f"axis {axis} isn't one before the last of shape {view.shape}")
    return axis


def _expect_rows(view: View) -> None:
    if not view.rows.ndim:
        raise ValueError(f"shape {view.shape} has no rows; by_element() makes them")


def _side_by_side(views: Sequence[View]) -> View:
    first = views[0]
    if any(
        not np.array_equal(view.rows, first.rows)
        or view.sources != first.sources
        or view.functions != first.functions
        or view.transposed
        for view in views
    ):
        raise ValueError("only pieces of the same rows can be joined along the last axis")
    columns = [
        np.arange(view.width, dtype=np.int64) if view.columns is None else view.columns
        for view in views
    ]
    joined = np.concatenate(columns)
    return replace(first, columns=joined, width=len(joined))
