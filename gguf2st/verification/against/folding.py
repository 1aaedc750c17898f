"""Moves scales back that went from one tensor into another without a change of the function.

Quantizers that look at activations multiply columns of the matrices that read something and
divide what wrote it: AWQ (arXiv:2306.00978), SmoothQuant, and gguf2st with an importance matrix.
The scales aren't stored. A norm's are the ratio of both sides' weights; those of a matrix that
writes are found row by row, and hold only if the columns of what reads them fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gguf2st.verification.against.measuring import Measure
from gguf2st.verification.against.places import Order, Place, SizeError, Sizes
from gguf2st.verification.grids import Rows

_ATTENTION = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_gate",
    "ssm_alpha",
    "ssm_beta",
    "ssm_ba",
)
_MLP = ("ffn_gate", "ffn_up", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps")
_SHARED = ("ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp")


@dataclass(frozen=True)
class Fold:
    """A writer and all its readers in one block. `heads`: a column of readers isn't a channel."""

    writer: Place
    bias: Place | None
    readers: tuple[Place, ...]
    heads: bool = False

    def channels(self, sizes: Sizes) -> Order:
        """For each column of a reader the row (or, of a norm, value) of the writer that it reads."""
        columns = np.arange(self.readers[0].width)
        written = self.writer.width if self.writer.height == 1 else self.writer.height
        if not self.heads:
            if len(columns) != written:
                raise SizeError("what is written and what is read differ in width")
            return columns
        if self.writer.stem == "ssm_norm":  # one norm for all value heads
            return columns % written
        # Each head of values is read by several heads of queries.
        head = written // sizes.kv_heads
        group = len(columns) // written
        return columns // head // group * head + columns % head


def folds(places: list[Place], before_mlp: str) -> Iterator[Fold]:
    """All there can be, norms first: what they explain isn't there any more for matrices."""
    blocks: dict[str, list[Place]] = {}
    for place in places:
        if place.block.startswith("blk."):
            blocks.setdefault(place.block, []).append(place)
    rules: tuple[tuple[str, tuple[str, ...], bool], ...] = (
        ("attn_norm", _ATTENTION, False),
        (before_mlp, (*_MLP, *_SHARED), False),
        ("ssm_norm", ("ssm_out",), True),
        ("attn_v", ("attn_output",), True),
        ("ffn_up", ("ffn_down",), False),
        ("ffn_up_shexp", ("ffn_down_shexp",), False),
        ("ffn_up_exps", ("ffn_down_exps",), False),
    )
    for writer, readers, heads in rules:
        for members in blocks.values():
            biases = {(p.stem, p.expert): p for p in members if p.suffix == "bias"}
            reading = [p for p in members if p.stem in readers and p.suffix == "weight"]
            for place in members:
                if place.stem != writer or place.suffix != "weight":
                    continue
                mine = [p for p in reading if p.expert == place.expert or not _stacked(writer)]
                if mine:
                    bias = biases.get((writer, place.expert))
                    yield Fold(place, bias, tuple(mine), heads)


def _stacked(stem: str) -> bool:
    return stem.endswith("_exps")


# Matrices whose rows may be divided, too.
WRITERS = frozenset({"attn_v", "ffn_up", "ffn_up_shexp", "ffn_up_exps"})
# Standard deviations of a fitted scale that it may be off.
_DEVIATIONS = 5


def row_factors(found: Measure) -> tuple[Rows, Rows] | None:
    """What each row of the checkpoint must be multiplied with to come closest to the GGUF's.

    The second is how uncertain that is, relatively, by what is left of the difference. None where
    a row would change its sign.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        best = found.product / found.own
        left = found.with_rows_scaled().difference / found.marks.shape[1]
        off = _DEVIATIONS * np.sqrt(left / found.own) / best
    empty = (found.own == 0) & (found.reference == 0)
    best[empty], off[empty] = 1, 0
    if not ((best > 0) & np.isfinite(best)).all():
        return None
    return best.astype(np.float32), off.astype(np.float32)
