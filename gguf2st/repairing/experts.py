"""Experts that lie one by one where engines read a stack, and the other way round.

Nothing is computed: rows of all experts follow one another in both forms, so bytes are copied.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from gguf2st.repairing.draft import Cast, Copied, Decoded, Draft, Given, Joined, PlannedTensor
from gguf2st.verification.context import Context
from gguf2st.verification.expected import Experts

# Beginnings of the classes whose unquantized stacks SGLang reads: load_fused_expert_weights in its
# models/qwen3_5.py and qwen3_vl_moe.py. Its other classes pass over a stack without a word.
STACKED_IN_SGLANG = ("Qwen3_5Moe", "Qwen3VLMoe")


def unstacked(draft: Draft, context: Context, blocks: Sequence[Experts]) -> tuple[str, ...]:
    """Give each expert of stacks (experts, rows, ...) its own tensors; what was changed."""
    done: dict[str, list[PlannedTensor]] = {}
    for block in blocks:
        parts = _parts(block)
        for stack, names in parts.items():
            matrix = context.stored.get(stack)
            if matrix is None:
                continue
            for leaf, tensor in matrix.leaves.items():
                pieces = _slices(draft, tensor.name, leaf, block.count, names)
                if pieces is None:
                    return ()
                done[tensor.name] = pieces
            if "weight_packed" in matrix.leaves and "weight_shape" not in matrix.leaves:
                done[matrix.tensors[0]] += _shapes(block, names)
    draft.substitute(done)
    return tuple(done)


def _parts(block: Experts) -> Mapping[str, list[str]]:
    """Stack -> patterns of the matrices whose rows follow one another in it."""
    if len(block.each) != 3 or len(block.stacked) != 2:
        return {}
    (gate, _), (up, _), (down, _) = block.each
    (joined, _), (lower, _) = block.stacked
    return {joined: [gate, up], lower: [down]}


def _slices(
    draft: Draft, name: str, leaf: str, count: int, patterns: Sequence[str]
) -> list[PlannedTensor] | None:
    tensor = draft.get(name)
    if not isinstance(tensor.source, Copied) or len(tensor.source.ranges) != 1:
        return None
    [(file, offset, _)] = tensor.source.ranges
    if len(tensor.shape) != 3 or tensor.shape[0] != count or tensor.shape[1] % len(patterns):
        return None
    shape = (tensor.shape[1] // len(patterns), tensor.shape[2])
    size = tensor.nbytes // (count * len(patterns))
    places = [(expert, pattern) for expert in range(count) for pattern in patterns]
    return [
        PlannedTensor(
            f"{pattern.format(expert)}.{leaf or 'weight'}",
            tensor.dtype,
            shape,
            Copied(((file, offset + number * size, size),)),
        )
        for number, (expert, pattern) in enumerate(places)
    ]


def _shapes(block: Experts, patterns: Sequence[str]) -> list[PlannedTensor]:
    """compressed-tensors' weight_shape, which transformers needs."""
    sizes = dict(block.each)
    return [
        PlannedTensor(
            f"{pattern.format(expert)}.weight_shape",
            "I64",
            (2,),
            Given(struct.pack("<2q", *sizes[pattern])),
        )
        for expert in range(block.count)
        for pattern in patterns
    ]


def stacked(draft: Draft, context: Context, blocks: Sequence[Experts]) -> tuple[str, ...]:
    """Stack unquantized experts that lie one by one, as the class holds them; what was changed."""
    done: dict[str, list[PlannedTensor]] = {}
    for block in blocks:
        shapes = dict(block.stacked)
        for stack, patterns in _parts(block).items():
            names = [
                f"{pattern.format(expert)}.weight"
                for expert in range(block.count)
                for pattern in patterns
            ]
            if not all(map(draft.find, names)):
                continue
            tensors = [draft.get(name) for name in names]
            rows = (block.count, len(patterns) * tensors[0].shape[0], tensors[0].shape[1])
            alike = len({(t.dtype, t.shape) for t in tensors}) == 1
            # Classes that hold them transposed would need more than copies.
            if not alike or rows != shapes[stack]:
                return ()
            parts = [t.source for t in tensors if isinstance(t.source, Copied | Decoded | Cast)]
            if len(parts) < len(tensors):
                return ()
            done |= {name: [] for name in names}
            done[names[0]] = [PlannedTensor(stack, tensors[0].dtype, rows, Joined(tuple(parts)))]
    draft.substitute(done)
    return tuple(done)
