"""Turns what was measured into findings, with what the difference looks like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.verification.against.measuring import Agreement, Measure
from gguf2st.verification.against.places import Place
from gguf2st.verification.against.result import Pair
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy

Numbers = npt.NDArray[np.floating[Any]]
Vectors = Mapping[Place, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
_AGAIN = Remedy(
    "convert the GGUF again, or compare with the one that it was made from", Mend.MISSING
)
_HEADS = Remedy(
    "put the heads in the order of the model's key heads, or convert the GGUF again", Mend.MISSING
)
# Sums of columns of the same rows differ by rounding alone, those of others by 1.4 of themselves.
_ALIKE = 0.4
_MOST_COMPARED = 400


def findings_of(
    pairs: Sequence[Pair],
    vectors: Vectors,
    orders: Mapping[Place, str],
    alone: Sequence[str],
    uncovered: Sequence[str],
    unsized: Mapping[str, str],
) -> Iterator[Finding]:
    """D-41 value heads in another order; A-01 values differ, A-02 no counterpart, A-03 rounded apart,
    A-04 scales moved. `orders` are those of value heads, where a known one explains the difference."""
    differing = [pair for pair in pairs if pair.agreement is Agreement.DIFFERS]
    for order in dict.fromkeys(filter(None, orders.values())):
        names = _named(pair for pair in differing if orders[pair.place] == order)
        text = f"the value heads of gated delta nets are {order}"
        yield Finding("D-41", "", Effect.WRONG, names, text, _HEADS)
    yield from _differences([pair for pair in differing if not orders[pair.place]], vectors)
    for reason in dict.fromkeys(unsized.values()):
        names = tuple(name for name, why in unsized.items() if why == reason)
        text = f"{reason}, so the GGUF's tensors for these can't be told"
        yield Finding("A-02", "", Effect.WRONG, names, text, _AGAIN)
    if alone:
        yield Finding("A-02", "", Effect.WRONG, tuple(alone), "the GGUF has no counterpart", _AGAIN)
    if uncovered:
        yield Finding(
            "A-02",
            "",
            Effect.WRONG,
            tuple(uncovered),
            "nothing in the checkpoint corresponds to these tensors of the GGUF, or not to all of their rows",
            _AGAIN,
        )
    apart = _named(pair for pair in pairs if pair.agreement is Agreement.APART)
    if apart:
        yield Finding(
            "A-03",
            "",
            Effect.NOTE,
            apart,
            "farther from the GGUF than one rounding explains and no farther than two roundings of the "
            "same weights are: the checkpoint was made from other files of this model, or its "
            "quantizer doesn't round to the nearest",
            Remedy(""),
        )
    scaled = _named(pair for pair in pairs if pair.agreement is Agreement.SCALED)
    if scaled:
        yield Finding(
            "A-04",
            "",
            Effect.NOTE,
            scaled,
            "scales have moved between what writes and what reads an activation, as AWQ does; moved "
            "back, the values agree",
            Remedy(""),
        )


def _named(pairs: Iterator[Pair]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pair.place.named for pair in pairs))


def _differences(pairs: Sequence[Pair], vectors: Vectors) -> Iterator[Finding]:
    exchanged = _exchanged(pairs, vectors)
    if exchanged:
        shown = "; ".join(f"{one} holds {other}" for one, other in list(exchanged.items())[:2])
        yield Finding(
            "A-01",
            "",
            Effect.WRONG,
            tuple(exchanged),
            f"the values are those of another tensor: {shown}",
            _AGAIN,
        )
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.place.named not in exchanged:
            groups.setdefault(_likeness(pair, vectors), []).append(pair)
    for likeness, members in groups.items():
        found = members[0].measure
        figures = ""
        if found is not None:
            figures = (
                f" (relative error {found.error:.2g}, {found.bound:.2g} is what rounding explains)"
            )
        yield Finding(
            "A-01", "", Effect.WRONG, _named(iter(members)), f"{likeness}{figures}", _AGAIN
        )


def _exchanged(pairs: Sequence[Pair], vectors: Vectors) -> dict[str, str]:
    """Tensors that hold what belongs to another one that differs, too -> that one."""
    found = {}
    measured = [pair for pair in pairs if pair.measure is not None][:_MOST_COMPARED]
    for one in measured:
        for other in measured:
            if one is other or (one.place.height, one.place.width) != (
                other.place.height,
                other.place.width,
            ):
                continue
            mark = _mark(other, vectors)[0]
            if _distance(mark, _mark(one, vectors)[1]) < _ALIKE / 4 or (
                one.place.height > 1 and _distance(mark, _mark(one, vectors)[1]) < _ALIKE
            ):
                found[one.place.named] = other.place.named
    return found


def _mark(pair: Pair, vectors: Vectors) -> tuple[Numbers, Numbers]:
    if pair.place in vectors:
        there, here = vectors[pair.place]
        return there - there.mean(), here - here.mean()
    measured = pair.measure
    marks = np.zeros((2, 0)) if measured is None else measured.marks
    return marks[0], marks[1]


def _distance(one: Numbers, other: Numbers) -> float:
    size = float(np.linalg.norm(one))
    return float(np.linalg.norm(one - other)) / size if size else float("inf")


def _likeness(pair: Pair, vectors: Vectors) -> str:
    """What the difference looks like, in words."""
    found = pair.measure
    if found is None:
        shape = "x".join(map(str, pair.tensor.shape))
        return f"the shape isn't the one that the GGUF's {shape} values come from"
    if pair.place in vectors:
        there, here = vectors[pair.place]
        apart = here - there
        if abs(apart.mean()) > 0.01 and apart.std() < 0.05 * abs(apart.mean()):
            return f"all values are {apart.mean():+.3g} off"
        if len(there) > 2 and _distance(np.sort(there), np.sort(here)) < 0.01:
            return "the values are there in another order"
    return _of_matrix(found)


def _of_matrix(found: Measure) -> str:
    own, reference, product = found.own.sum(), found.reference.sum(), found.product.sum()
    if own and reference and product / np.sqrt(own * reference) > 0.9:
        factor = own and product / own
        if abs(np.log(factor)) > 0.1:
            return f"the values are {1 / factor:.3g} times those of the GGUF"
    wrong = int(np.count_nonzero(found.difference > 0.25 * (found.reference + 1e-60)))
    if 0 < wrong < 0.5 * len(found.reference):
        return f"some rows differ, {wrong} of {len(found.reference)} in the first"
    if wrong > 1 and _distance(found.marks[0], found.marks[1]) < _ALIKE:
        return "rows are there in another order"
    if wrong:
        return "the values have nothing to do with the GGUF's, or are in another order"
    return "the values are near the GGUF's, and not near enough"
