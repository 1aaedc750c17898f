"""Runs a Plan: packed rows in, encoded rows out at their final offsets. Decides nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gguf2st import gpu
from gguf2st.arrays import Array, is_tensor, rounded_to
from gguf2st.buffers import Buffers
from gguf2st.checkpoint.writer import Placement, ShardWriter
from gguf2st.errors import Gguf2stError, InputError
from gguf2st.gguf.blocks import PackedRows
from gguf2st.gpu import open_gpu
from gguf2st.jit import watched
from gguf2st.mapping import Recipe
from gguf2st.mapping.view import Values, View
from gguf2st.modules import block_factor, importance_of, scale_group
from gguf2st.plan import CHUNK_ELEMENTS, DIRECT_ELEMENTS, Plan, PlannedModule, PlannedTensor
from gguf2st.quantize import ErrorSums
from gguf2st.rounding import DTYPES as DIRECT
from gguf2st.rounding import count_not_finite
from gguf2st.targets import EncodeContext, ModuleEncoder, encode_dense


@dataclass(frozen=True)
class Progress:
    """How far a conversion is, in bytes of output, and the tensor that was just written.

    `compiling` while kernels are made for this processor, which is kept for later runs.
    """

    done_bytes: int
    total_bytes: int
    tensor: str
    compiling: bool = False


ProgressCallback = Callable[[Progress], None]


@dataclass
class Outcome:
    """What a run measured.

    `errors` holds the error sums of each quantized module, `moved` are those whose blocks were
    kept, `broken` says how many values of a tensor aren't finite. `rounded` are tensors that a
    lossless format couldn't hold exactly. Kernels were compiled for `compile_seconds` of wall time.
    """

    errors: dict[str, ErrorSums] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    weighted: set[str] = field(default_factory=set)
    broken: dict[str, int] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)
    compile_seconds: float = 0.0


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
        with (
            watched(work.tell_compiling) as watch,
            ThreadPoolExecutor(threads, thread_name_prefix="gguf2st") as pool,
        ):
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
    work.outcome.compile_seconds = watch.seconds
    return work.outcome


Job = Callable[[], None]


@dataclass(frozen=True)
class _Range:
    """Of modules that share a scale: their largest magnitude, or how their blocks can be kept."""

    maximum: float = 0.0
    block_factor: float | None = None


class _Work:
    """Jobs, handed out to workers in the order of the files."""

    def __init__(self, plan: Plan, writer: ShardWriter, progress: ProgressCallback | None) -> None:
        self._plan, self._writer, self._progress = plan, writer, progress
        self._jobs = self._all_jobs()
        self._lock = threading.Lock()
        self._stopped = False
        self._done = 0
        self._total = sum(placement.nbytes for placement in plan.placements)
        self._buffers = Buffers()
        self._partners: dict[str, list[PlannedModule]] = {}
        for module in plan.modules:
            self._partners.setdefault(scale_group(module.module), []).append(module)
        self._ranges: dict[str, _Range] = {}
        self._ranges_lock = threading.Lock()
        self._gpu = open_gpu(plan.options.device)
        self._chunk = CHUNK_ELEMENTS if self._gpu is None else gpu.CHUNK_ELEMENTS
        self.outcome = Outcome()

    def stop(self) -> None:
        """Let workers end after their current piece."""
        self._stopped = True

    def tell_compiling(self) -> None:
        """Tell the caller that kernels are being compiled."""
        with self._lock:
            if self._progress is not None:
                self._progress(Progress(self._done, self._total, "", compiling=True))

    def drain(self) -> None:
        """Take and do jobs until none is left."""
        with contextlib.nullcontext() if self._gpu is None else self._gpu.worker():
            self._drain()

    def _drain(self) -> None:
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
            view, spec = tensor.recipe.view(), tensor.placement.spec
            direct = spec.dtype in DIRECT and not view.single and view.acts_on_packed_rows()
            direct = direct and not self._plan.folding.changes(tensor.recipe)
            copy, chunk = self._copy, CHUNK_ELEMENTS
            # A lossless format compares values with what becomes of them.
            compares = self._plan.target.by_type
            if not compares and self._on_gpu(view) and view.acts_on_packed_rows():
                copy, chunk = self._copy_on_gpu, self._chunk
            elif not compares and direct:
                copy, chunk = self._copy_directly, DIRECT_ELEMENTS
            rows = tensor.placement.row_count
            step = max(1, chunk // spec.shape[-1])
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                yield lambda c=copy, t=tensor, v=view, a=start, b=stop: c(t, v, a, b)  # type: ignore[misc]

    def _copy_directly(self, tensor: PlannedTensor, view: View, start: int, stop: int) -> None:
        """Decode and round in one go; float32 values are there only of what a core's cache holds."""
        dtype = tensor.placement.spec.dtype
        rounded, odd = view.read_rounded(start, stop, dtype, self._buffers)
        if odd:
            self._copy(tensor, view, start, stop)
        else:
            self._write(tensor.placement, start, rounded)

    def _copy_on_gpu(self, tensor: PlannedTensor, view: View, start: int, stop: int) -> None:
        values = self._values(tensor.recipe, view, start, stop)
        self._plan.folding.apply(tensor.recipe, start, values)
        encoded = rounded_to(values, tensor.placement.spec.dtype)
        if encoded.isfinite().all():
            self._write(tensor.placement, start, encoded)
        else:
            # The CPU's way says what is wrong, and has its own bits for what isn't a number.
            self._copy(tensor, view, start, stop)

    def _on_gpu(self, view: View) -> bool:
        return self._gpu is not None and not view.single and view.elements >= gpu.SMALLEST

    def _values(self, recipe: Recipe, view: View, start: int, stop: int) -> Array:
        """Values of rows: an array, or a tensor where a GPU is to work on them."""
        if self._gpu is None or not self._on_gpu(view):
            return self._read(recipe, view, start, stop)
        if view.acts_on_packed_rows():
            return self._gpu.decoded(view, start, stop)
        return self._gpu.upload(self._read(recipe, view, start, stop))

    def _copy(self, tensor: PlannedTensor, view: View, start: int, stop: int) -> None:
        values = self._read(tensor.recipe, view, start, stop)
        self._plan.folding.apply(tensor.recipe, start, values)
        encoded = encode_dense(tensor.placement.spec, values)
        self._write(tensor.placement, start, encoded)
        self._count_broken(tensor.recipe.name, values)
        if self._plan.target.by_type and not np.array_equal(encoded, values, equal_nan=True):
            with self._lock:
                self.outcome.rounded.add(tensor.recipe.name)

    def _quantize(self, planned: PlannedModule) -> None:
        view, errors = planned.module.view(), ErrorSums()
        known = self._range(planned)
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
            context = EncodeContext(
                importance, known.maximum, self._plan.options.fit, scale, known.block_factor
            )
            encoder = self._plan.target.encoder(planned.quantized, context)
            as_blocks = known.block_factor is not None
            first = number * planned.module.shape[0]
            self._encode(planned, view, encoder, first, as_blocks=as_blocks)
            errors.add(encoder.errors)
            if importance is not None:
                with self._lock:
                    self.outcome.weighted.add(planned.module.name)
        with self._lock:
            self.outcome.errors[planned.module.name] = errors
            if known.block_factor is not None:
                self.outcome.moved.add(planned.module.name)

    def _encode(
        self,
        planned: PlannedModule,
        view: View,
        encoder: ModuleEncoder,
        first: int,
        *,
        as_blocks: bool,
    ) -> None:
        """Write one matrix, whose rows begin with row `first` of the view and of the tensors."""
        module, folding = planned.module, self._plan.folding

        packed = encoder.takes_packed and not view.single and not self._on_gpu(view)
        packed = packed and view.acts_on_packed_rows() and not folding.changes_module(module)

        def values(start: int, stop: int) -> Array | PackedRows:
            if packed:
                return view.packed_rows(start, stop, self._buffers)
            found = self._values(module.recipe, view, start, stop)
            folding.apply_to_module(module, start, found)
            return found

        for begin, end in _pieces(planned, encoder.row_multiple, self._chunk):
            start, stop = first + begin, first + end
            try:
                pieces = (
                    encoder.encode_blocks(start, view.read_packed(start, stop, self._buffers))
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

    def _range(self, planned: PlannedModule) -> _Range:
        """What must be known of a module before it is encoded; computed once for partners in a scale."""
        scheme, group = planned.quantized.scheme, scale_group(planned.module)
        if not scheme.same_blocks:
            return _Range()
        if not scheme.needs_maximum:
            return _Range(block_factor=block_factor([planned.module], scheme.same_blocks))
        with self._ranges_lock:
            if group not in self._ranges:
                partners = self._partners[group]
                factor = block_factor((p.module for p in partners), scheme.same_blocks)
                maximum = self._maximum(partners) if factor is None else 0.0
                self._ranges[group] = _Range(maximum, factor)
            return self._ranges[group]

    def _maximum(self, modules: Sequence[PlannedModule]) -> float:
        """Largest magnitude over modules."""
        return max(
            float(abs(self._values(p.module.recipe, p.module.view(), start, stop)).max())
            for p in modules
            for start, stop in _pieces(p, 1, self._chunk)
        )

    def _read(self, recipe: Recipe, view: View, start: int, stop: int) -> Values:
        try:
            return view.read(start, stop, self._buffers)
        except Gguf2stError:
            raise
        except ValueError as error:
            source = recipe.sources[0].tensor
            raise InputError(
                f"tensor {source.name} of {source.file.path} can't become {recipe.name}: {error}; "
                "the file is damaged or its converter was faulty."
            ) from error

    def _write(self, placement: Placement, start: int, rows: Array) -> None:
        if self._gpu is not None and is_tensor(rows):
            for first, piece in self._gpu.download(rows):
                self._write(placement, start + first, piece)
            return
        data = np.ascontiguousarray(rows)
        row_bytes = data.nbytes // max(1, len(data))
        self._writer.write(placement.shard, placement.offset + start * row_bytes, data)
        with self._lock:
            self._done += data.nbytes
            if self._progress is not None:
                self._progress(Progress(self._done, self._total, placement.spec.name))

    def _count_broken(self, name: str, values: Values) -> None:
        broken = count_not_finite(values)
        if broken:
            with self._lock:
                self.outcome.broken[name] = self.outcome.broken.get(name, 0) + broken


def _pieces(planned: PlannedModule, multiple: int, elements: int) -> Iterator[tuple[int, int]]:
    rows, columns = planned.quantized.shape
    step = max(1, elements // columns // multiple) * multiple
    for start in range(0, rows, step):
        yield start, min(rows, start + step)
