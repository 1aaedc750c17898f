"""Runs a Plan: packed rows in, encoded rows out at their final offsets. Decides nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gguf2st.checkpoint.writer import Placement, ShardWriter
from gguf2st.errors import Gguf2stError, InputError
from gguf2st.mapping import Recipe
from gguf2st.mapping.view import Values, View
from gguf2st.modules import importance_of
from gguf2st.plan import CHUNK_ELEMENTS, Plan, PlannedModule, PlannedTensor
from gguf2st.quantize import ErrorSums
from gguf2st.targets import EncodeContext, ModuleEncoder, encode_dense


@dataclass(frozen=True)
class Progress:
    """How far a conversion is, in bytes of output, and the tensor that was just written."""

    done_bytes: int
    total_bytes: int
    tensor: str


ProgressCallback = Callable[[Progress], None]


@dataclass
class Outcome:
    """What a run measured.

    `errors` holds the error sums of each quantized module, `broken` how many values
    of a tensor aren't finite.
    """

    errors: dict[str, ErrorSums] = field(default_factory=dict)
    weighted: set[str] = field(default_factory=set)
    broken: dict[str, int] = field(default_factory=dict)


def run(plan: Plan, directory: Path, progress: ProgressCallback | None = None) -> Outcome:
    """Write every file of a plan into an existing directory."""
    for name, text in plan.documents.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    writer = ShardWriter(directory, plan.shards)
    work = _Work(plan, writer, progress)
    threads = plan.options.threads
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="gguf2st") as pool:
            workers = [pool.submit(work.drain) for _ in range(threads)]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:
                work.stop()
                raise
    except BaseException:
        writer.close(durable=False)
        raise
    writer.close(durable=True)
    return work.outcome


Job = Callable[[], None]


class _Work:
    """Jobs, handed out to workers in the order of the files."""

    def __init__(self, plan: Plan, writer: ShardWriter, progress: ProgressCallback | None) -> None:
        self._plan, self._writer, self._progress = plan, writer, progress
        self._jobs = self._all_jobs()
        self._lock = threading.Lock()
        self._stopped = False
        self._done = 0
        self._total = sum(placement.nbytes for placement in plan.placements)
        self._maxima: dict[str, float] = {}
        self._maxima_lock = threading.Lock()
        self.outcome = Outcome()

    def stop(self) -> None:
        """Let workers end after their current piece."""
        self._stopped = True

    def drain(self) -> None:
        """Take and do jobs until none is left."""
        while not self._stopped:
            with self._lock:
                job = next(self._jobs, None)
            if job is None:
                return
            try:
                job()
            except BaseException:
                self.stop()
                raise

    def _all_jobs(self) -> Iterator[Job]:
        # Matrices first: one of them is a longer job than a piece of an unquantized tensor,
        # and short jobs at the end keep all workers busy to the last.
        for module in self._plan.modules:
            yield lambda module=module: self._quantize(module)  # type: ignore[misc]
        for tensor in self._plan.tensors:
            rows = tensor.placement.row_count
            step = max(1, CHUNK_ELEMENTS // tensor.placement.spec.shape[-1])
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                yield lambda t=tensor, a=start, b=stop: self._copy(t, a, b)  # type: ignore[misc]

    def _copy(self, tensor: PlannedTensor, start: int, stop: int) -> None:
        values = self._read(tensor.recipe, tensor.recipe.view(), start, stop)
        self._plan.folding.apply(tensor.recipe, start, values)
        encoded = encode_dense(tensor.placement.spec, values)
        self._write(tensor.placement, start, encoded)
        self._count_broken(tensor.recipe.name, values)

    def _quantize(self, planned: PlannedModule) -> None:
        view, errors = planned.module.view(), ErrorSums()
        maximum = self._group_maximum(planned) if planned.quantized.scheme.needs_maximum else 0.0
        scale = (self._plan.options.activation_scales or {}).get(planned.module.name, 1.0)
        columns = self._plan.folding.column_scales(planned.module.name)
        # Each matrix of a stack has an importance of its own.
        for number in range(planned.module.experts or 1):
            importance = None
            if self._plan.options.importance is not None:
                importance = importance_of(planned.module, self._plan.options.importance, number)
            if importance is not None and columns is not None:
                # What the folded matrix is multiplied with has become that much smaller.
                importance = np.divide(importance, np.square(columns))
            context = EncodeContext(importance, maximum, self._plan.options.fit, scale)
            encoder = self._plan.target.encoder(planned.quantized, context)
            self._encode(planned, view, encoder, number * planned.module.shape[0])
            errors.add(encoder.errors)
            if importance is not None:
                with self._lock:
                    self.outcome.weighted.add(planned.module.name)
        with self._lock:
            self.outcome.errors[planned.module.name] = errors

    def _encode(
        self, planned: PlannedModule, view: View, encoder: ModuleEncoder, first: int
    ) -> None:
        """Write one matrix, whose rows begin with row `first` of the view and of the tensors."""
        module, kind = planned.module, view.packed_type()
        as_blocks = kind is not None and kind.name == encoder.same_blocks
        folding = self._plan.folding

        def values(start: int, stop: int) -> Values:
            found = self._read(module.recipe, view, start, stop)
            folding.apply_to_module(module, start, found)
            return found

        for begin, end in _pieces(planned, encoder.row_multiple):
            start, stop = first + begin, first + end
            try:
                pieces = (
                    encoder.encode_blocks(start, view.read_packed(start, stop))
                    if as_blocks
                    else encoder.encode(start, values(start, stop))
                )
                for piece in pieces:
                    self._write(planned.placements[piece.tensor], piece.start, piece.rows)
            except ValueError as error:
                raise InputError(
                    f"{module.name} (from {module.source().tensor.name} of "
                    f"{module.source().tensor.file.path}) can't be quantized: {error}; "
                    f"leave it as it is with --keep {module.name!r}."
                ) from error
        for piece in encoder.finish():
            self._write(planned.placements[piece.tensor], piece.start, piece.rows)

    def _group_maximum(self, planned: PlannedModule) -> float:
        """Largest magnitude over a module and its fused partners; computed once for a group."""
        group = planned.module.fused or planned.module.name
        with self._maxima_lock:
            if group not in self._maxima:
                self._maxima[group] = max(
                    float(np.abs(self._read(p.module.recipe, p.module.view(), start, stop)).max())
                    for p in self._plan.modules
                    if (p.module.fused or p.module.name) == group
                    for start, stop in _pieces(p, 1)
                )
            return self._maxima[group]

    def _read(self, recipe: Recipe, view: View, start: int, stop: int) -> Values:
        try:
            return view.read(start, stop)
        except Gguf2stError:
            raise
        except ValueError as error:
            source = recipe.sources[0].tensor
            raise InputError(
                f"tensor {source.name} of {source.file.path} can't become {recipe.name}: {error}; "
                "the file is damaged or its converter was faulty."
            ) from error

    def _write(self, placement: Placement, start: int, rows: np.ndarray[Any, Any]) -> None:
        data = np.ascontiguousarray(rows)
        row_bytes = data.nbytes // max(1, len(data))
        self._writer.write(placement.shard, placement.offset + start * row_bytes, data)
        with self._lock:
            self._done += data.nbytes
            if self._progress is not None:
                self._progress(Progress(self._done, self._total, placement.spec.name))

    def _count_broken(self, name: str, values: Values) -> None:
        broken = values.size - int(np.isfinite(values).sum())
        if broken:
            with self._lock:
                self.outcome.broken[name] = self.outcome.broken.get(name, 0) + broken


def _pieces(planned: PlannedModule, multiple: int) -> Iterator[tuple[int, int]]:
    rows, columns = planned.quantized.shape
    step = max(1, CHUNK_ELEMENTS // columns // multiple) * multiple
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
