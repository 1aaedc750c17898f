"""Compares every tensor of a checkpoint with a GGUF and says what agrees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from gguf2st.errors import Gguf2stError, UnsupportedError
from gguf2st.gguf import GgufModel, TensorInfo
from gguf2st.verification.against.families import FAMILIES, Family, Tower, family_of, tower_of
from gguf2st.verification.against.findings import findings_of
from gguf2st.verification.against.folding import WRITERS, Fold, folds, row_factors
from gguf2st.verification.against.forward import DRAFT, TEXT, VISION, Item, forward, items_of
from gguf2st.verification.against.heads import other_orders
from gguf2st.verification.against.measuring import (
    NONE,
    Agreement,
    Checkpoint,
    Factors,
    GgufRows,
    Measure,
    measure,
    vectors,
)
from gguf2st.verification.against.places import Place, Sizes
from gguf2st.verification.against.result import Comparison, Figures, Pair
from gguf2st.verification.context import Context
from gguf2st.verification.decoding import decoding_of, refusal
from gguf2st.verification.grids import Rows

# Each holds chunks of its own, some tens of megabytes.
_THREADS = min(
    8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
_SOUND = (Agreement.SAME, Agreement.SCALED, Agreement.APART)


def compare(context: Context, model: GgufModel) -> Comparison:
    """Decode both sides and compare all tensors that have a counterpart.

    Raises `UnsupportedError` for an architecture whose conversion isn't written down here.
    """
    family = family_of(model.architecture)
    if family is None:
        known = ", ".join(name for f in FAMILIES for name in f.architectures)
        raise UnsupportedError(
            f"what llama.cpp makes of {model.architecture} isn't written down here, so the checkpoint "
            f"can't be compared with {model.language.path}; leave --against out (known: {known})."
        )
    run = _Run(context)
    items = items_of(context)
    by_component = {c: [i for i in items if i.component == c] for c in (TEXT, DRAFT, VISION)}
    drafts = any(".nextn." in name for name in model.tensors)
    text = by_component[TEXT] + (by_component[DRAFT] if drafts else [])
    if by_component[DRAFT] and not drafts:
        run.left_out.append(
            "the GGUF has no MTP blocks, so those of the checkpoint weren't compared"
        )
    sizes = Sizes(context.view.text_config)
    run.component(text, family, sizes, model.tensors)
    run.undo_folds(family, sizes)
    run.vision(by_component[VISION], model)
    return run.result(str(model.language.path))


class _Run:
    """The state of one comparison."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._checkpoint = Checkpoint(
            context.view.directory, decoding_of(context.view.quantization)
        )
        self._pairs: dict[Place, Pair] = {}
        self._rows: dict[Place, GgufRows] = {}
        self._items: dict[str, Item] = {}
        self.left_out: list[str] = []
        self._alone: list[str] = []
        self._uncovered: list[str] = []
        self._unsized: dict[str, str] = {}

    def component(
        self,
        items: list[Item],
        rules: Family | Tower,
        sizes: Sizes,
        tensors: dict[str, TensorInfo],
    ) -> None:
        """Compare the items of a language model or of a vision tower."""
        found = forward(items, rules, sizes, tensors)
        self._items |= {item.name: item for item in items}
        self._alone += [item.name for item in found.alone]
        layers = sizes.config.get("num_hidden_layers")
        drafts = any(item.component == DRAFT for item in items)
        self._unsized |= found.unsized
        refused = {p.gguf for p in found.places if self._refusal(self._items[p.item])}
        for name in found.uncovered:
            if name in refused or found.unsized:
                continue
            if not drafts and isinstance(layers, int) and _behind(name, layers):
                self._say("the checkpoint has no MTP blocks, so those of the GGUF weren't compared")
            else:
                self._uncovered.append(name)
        # Large ones first, so that no thread is left with one at the end.
        order = sorted(found.places, key=lambda place: -place.height * place.width)
        with ThreadPoolExecutor(_THREADS) as pool:
            pairs = pool.map(lambda place: self._compared(place, tensors), order)
            judged = dict(zip(order, pairs, strict=True))
        kept = ((place, judged[place]) for place in found.places)
        self._pairs |= {place: pair for place, pair in kept if pair is not None}

    def vision(self, items: list[Item], model: GgufModel) -> None:
        """Compare the vision tower, if there is one on both sides."""
        if model.projector is None:
            if items:
                self._say("the vision tower wasn't compared; give its GGUF with --mmproj")
            return
        keys = model.projector.metadata
        kind = str(keys.get("clip.projector_type", keys.get("clip.vision.projector_type")))
        tower = tower_of(kind)
        if tower is None:
            self._say(f"what llama.cpp makes of a {kind} isn't written down here: not compared")
            return
        config = self._context.view.config.get("vision_config")
        sizes = Sizes(config if isinstance(config, dict) else {})
        self.component(items, tower, sizes, model.projector.tensors)

    def _compared(self, place: Place, tensors: dict[str, TensorInfo]) -> Pair | None:
        item, tensor = self._items[place.item], tensors[place.gguf]
        reason = self._refusal(item)
        if reason:
            self._say(f"{item.matrix.name} wasn't compared: {reason}")
            return None
        scale = tensors.get(f"{place.gguf.removesuffix('.weight')}.scale")
        rows = GgufRows(tensor, max(1, place.width))
        if scale is not None and tensor.kind.name == "NVFP4":
            rows.scale = GgufRows(scale, 1).take(np.arange(scale.elements)).reshape(-1).copy()
        self._rows[place] = rows
        matrix = len(tensor.shape) in (2, 3) and tensor.columns != place.width
        if matrix or tensor.elements % rows.width or place.first + place.height > rows.height:
            return Pair(place, item, tensor, None, Agreement.DIFFERS)
        found = self._measured(place, NONE)
        agreement = found.agreement(tensor.kind) if found is not None else Agreement.DIFFERS
        return Pair(place, item, tensor, found, agreement)

    def _refusal(self, item: Item) -> str:
        return refusal(item.matrix, self._checkpoint.decoding, stacks=True)

    def _measured(self, place: Place, factors: Factors) -> Measure | None:
        matrix = self._items[place.item].matrix
        try:
            return measure(self._checkpoint, matrix, place, self._rows[place], factors)
        except (Gguf2stError, ValueError, IndexError, OSError) as error:
            text = " ".join(str(error).split())[:100]
            self._say(f"{matrix.name} can't be decoded ({text})")
            return None

    def undo_folds(self, family: Family, sizes: Sizes) -> None:
        """Move scales back where a writer and most of its readers then agree with the GGUF."""
        factors: dict[Place, Factors] = {}
        for fold in folds(list(self._pairs), family.before_mlp):
            pair = self._pairs[fold.writer]
            readers = [self._pairs[place] for place in fold.readers]
            same = [reader.agreement is Agreement.SAME for reader in readers]
            if (
                pair.agreement is Agreement.SAME
                or pair.measure is None
                or sum(same) * 2 > len(same)
            ):
                continue
            try:
                self._undo(fold, factors, sizes)
            except ValueError:  # sizes that don't fit: nothing to undo
                continue

    def _undo(self, fold: Fold, factors: dict[Place, Factors], sizes: Sizes) -> None:
        writer = self._pairs[fold.writer]
        norm = fold.writer.height == 1
        before = factors.get(fold.writer, NONE)
        if writer.measure is None:
            return
        scales = self._norm(fold) if norm else row_factors(writer.measure)
        if scales is None:
            return
        channels = fold.channels(sizes)
        across, uncertainty = scales[0][channels], scales[1][channels]
        moved = {}
        for place in fold.readers:
            old = factors.get(place, NONE)
            columns = (np.float32(1) if old.columns is None else old.columns) / across
            moved[place] = Factors(columns, old.rows, uncertainty, norm and old.exact)
        if not norm:
            moved[fold.writer] = replace(before, rows=scales[0], exact=False)
        judged = {}
        for place, each in moved.items():
            found = self._measured(place, each)
            if found is None:
                return
            judged[place] = found, found.agreement(self._pairs[place].tensor.kind)
        if not self._better(fold, judged):
            return
        for place, (found, agreement) in judged.items():
            factors[place] = moved[place]
            scaled = Agreement.SCALED if agreement is Agreement.SAME else agreement
            self._pairs[place] = replace(self._pairs[place], measure=found, agreement=scaled)
        if norm:
            self._pairs[fold.writer] = replace(writer, measure=None, agreement=Agreement.SCALED)
        elif fold.bias in self._pairs:
            self._undo_bias(fold.bias, Factors(scales[0], None, scales[1], exact=False))

    def _better(self, fold: Fold, judged: dict[Place, tuple[Measure, Agreement]]) -> bool:
        """Whether most readers agree now and are much nearer than before, and what writes agrees."""
        if fold.writer in judged and judged[fold.writer][1] not in _SOUND:
            return False
        better = 0
        for place in fold.readers:
            pair, (now, agreement) = self._pairs[place], judged[place]
            before = pair.measure
            if before is None:
                continue
            if place.stem in WRITERS:  # its rows may have been divided for others in turn
                now, before = now.with_rows_scaled(), before.with_rows_scaled()
                agreement = now.agreement(pair.tensor.kind)
            nearer = now.difference.sum() < before.difference.sum() / 2
            better += agreement in _SOUND and nearer
        return better * 2 > len(fold.readers)

    def _norm(self, fold: Fold) -> tuple[Rows, Rows] | None:
        """What a norm was divided by, and how uncertain that is."""
        item = self._items[fold.writer.item]
        there, here, half = vectors(
            self._checkpoint, item.matrix, fold.writer, self._rows[fold.writer]
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: Rows = there / here
            uncertainty = np.asarray(half / np.abs(here), np.float32)
        return (ratio, uncertainty) if (np.isfinite(ratio) & (ratio > 0)).all() else None

    def _undo_bias(self, place: Place | None, factors: Factors) -> None:
        found = self._measured(place, factors) if place is not None else None
        if place is None or found is None:
            return
        if found.agreement(self._pairs[place].tensor.kind) in _SOUND:
            self._pairs[place] = replace(
                self._pairs[place], measure=found, agreement=Agreement.SCALED
            )

    def _order(self, place: Place) -> str:
        """The order in which value heads lie, where it is a known one that isn't right."""
        pair = self._pairs[place]
        if pair.agreement is not Agreement.DIFFERS or pair.measure is None:
            return ""
        for name, other in other_orders(place, Sizes(self._context.view.text_config)):
            self._rows[other] = self._rows[place]
            found = self._measured(other, NONE)
            if found is not None and found.agreement(pair.tensor.kind) in _SOUND:
                return name
        return ""

    def _say(self, text: str) -> None:
        if text not in self.left_out:
            self.left_out.append(text)

    def result(self, path: str) -> Comparison:
        """All figures and findings."""
        pairs = list(self._pairs.values())
        vectors_of = {
            place: vectors(self._checkpoint, pair.item.matrix, place, self._rows[place])[:2]
            for place, pair in self._pairs.items()
            if pair.agreement is Agreement.DIFFERS and pair.measure and place.height == 1
        }
        orders = {p: self._order(p) for p in self._pairs}
        return Comparison(
            path,
            tuple(_figures(pairs)),
            tuple(
                findings_of(pairs, vectors_of, orders, self._alone, self._uncovered, self._unsized)
            ),
            tuple(self.left_out),
        )


def _behind(name: str, layers: int) -> bool:
    number = name.removeprefix("blk.").partition(".")[0]
    return name.startswith("blk.") and number.isdecimal() and int(number) >= layers


def _figures(pairs: list[Pair]) -> Iterator[Figures]:
    for pair in pairs:
        found, matrix = pair.measure, pair.item.matrix
        yield Figures(
            pair.place.named,
            pair.place.gguf,
            pair.item.component,
            pair.tensor.kind.name,
            str(matrix.scheme) if matrix.scheme else next(iter(matrix.leaves.values())).dtype,
            pair.place.height * pair.place.width,
            found.error if found else None,
            found.bound if found else None,
            found.worst_row if found else None,
            found.beyond if found else None,
            pair.agreement.value,
        )
