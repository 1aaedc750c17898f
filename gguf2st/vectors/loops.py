"""Loops and branches of formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gguf2st.vectors.types import llvm_type
from gguf2st.vectors.values import Operand, Value, as_kind, builder


def loop(
    start: Operand, stop: Operand, step: int, body: Callable[..., Any], *carried: Value
) -> tuple[Value, ...]:
    """Run `body(index, *carried)` for each index; it returns what the next one carries on.

    Where it carries nothing on, it returns None. What the last one carried on is returned.
    """
    entry = builder().block
    head, inside, after = (
        builder().append_basic_block(f"loop.{name}") for name in ("head", "body", "end")
    )
    first, last = as_kind(start, "i64"), as_kind(stop, "i64")
    builder().branch(head)
    builder().position_at_end(head)
    merged = [_merged(value, entry) for value in (first, *carried)]
    index, *inner = (Value(phi, *shape) for phi, shape in merged)
    builder().cbranch((index < last).llvm, inside, after)
    builder().position_at_end(inside)
    results = body(index, *inner)
    following = (index + step, *((results,) if isinstance(results, Value) else results or ()))
    for (phi, _), value in zip(merged, following, strict=True):
        phi.add_incoming(value.llvm, builder().block)
    builder().branch(head)
    builder().position_at_end(after)
    return tuple(inner)


def branch(condition: Operand, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """What one of two functions computes, a value or a tuple; only that one is run."""
    blocks = [builder().append_basic_block(f"branch.{name}") for name in ("yes", "no", "end")]
    builder().cbranch(as_kind(condition, "mask").llvm, *blocks[:2])
    results, ends = [], []
    for block, function in zip(blocks[:2], (yes, no), strict=True):
        builder().position_at_end(block)
        results.append(function())
        ends.append(builder().block)
        builder().branch(blocks[2])
    builder().position_at_end(blocks[2])
    one, other = results
    if isinstance(one, Value):
        return _joined((one,), (other,), ends)[0]
    return _joined(one, other, ends)


def _joined(one: tuple[Value, ...], other: tuple[Value, ...], ends: list[Any]) -> tuple[Value, ...]:
    """Values that come from one of two blocks."""
    result = []
    for first, second in zip(one, other, strict=True):
        phi, shape = _merged(first, ends[0])
        phi.add_incoming(second.llvm, ends[1])
        result.append(Value(phi, *shape))
    return tuple(result)


def _merged(value: Value, block: Any) -> tuple[Any, tuple[str, int]]:
    """A phi node that has a value where it is reached from a block, and its kind and count."""
    phi = builder().phi(llvm_type(value.kind, value.count))
    phi.add_incoming(value.llvm, block)
    return phi, (value.kind, value.count)
