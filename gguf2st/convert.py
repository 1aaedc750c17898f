"""Runs a Plan: packed rows in, encoded rows out at their final offsets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from gguf2st.checkpoint.original import TOKENIZER_FILES, original_directory
from gguf2st.checkpoint.writer import ShardWriter, appearing_directory, check_output
from gguf2st.errors import Gguf2stError, InputError, VerificationError
from gguf2st.gguf import open_model
from gguf2st.plan import CHUNK_ELEMENTS, DEFAULT_SHARD_BYTES, Plan, PlannedTensor, make_plan
from gguf2st.report import ConversionReport

DEFAULT_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Progress:
    """How far a conversion is, in bytes of output, and the tensor that was just written."""

    done_bytes: int
    total_bytes: int
    tensor: str


ProgressCallback = Callable[[Progress], None]
PathLike = str | os.PathLike[str]


def convert(
    model: PathLike,
    output: PathLike | None = None,
    *,
    mmproj: PathLike | None = None,
    mtp: PathLike | None = None,
    to: str = "bf16",
    dry_run: bool = False,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer_from: PathLike | None = None,
    config_from: PathLike | None = None,
    mappings: PathLike | None = None,
    threads: int = DEFAULT_THREADS,
    progress: ProgressCallback | None = None,
) -> ConversionReport:
    """Convert a GGUF model to a Hugging Face directory.

    `model` is a GGUF file or any shard of a split one; `mmproj` and `mtp` are the
    files that belong to it; `to` names an output format; `output` defaults to a
    directory beside the working one, named after the model and the format.
    `tokenizer_from` and `config_from` are directories (or hub names) of the
    original. `mappings` is a directory of mapping tables to use instead of the
    shipped ones. `progress` is called from worker threads, one call at a time.

    Raises subclasses of `Gguf2stError`; whatever is raised, nothing is left behind.
    """
    started = time.monotonic()
    opened = open_model(model, mmproj, mtp)
    stem = opened.language.path.stem
    final = Path(output) if output is not None else Path(f"{stem}-{to}")
    check_output(final, force=force or dry_run)
    plan = make_plan(
        opened,
        to=to,
        maximum_shard_bytes=max_shard_bytes,
        tokenizer_from=original_directory(tokenizer_from, TOKENIZER_FILES)
        if tokenizer_from
        else None,
        config_from=original_directory(config_from, ("config.json",)) if config_from else None,
        mapping_directory=Path(mappings) if mappings else None,
        threads=threads,
    )
    warnings = list(plan.warnings)
    if not dry_run:
        with appearing_directory(final, force=force, needed_bytes=plan.total_bytes) as partial:
            warnings += run(plan, partial, progress)
            check_written(plan, partial)
    types: dict[str, int] = {}
    for source in opened.sources:
        for kind, (count, _) in source.type_histogram().items():
            types[kind] = types.get(kind, 0) + count
    return ConversionReport(
        output=final,
        architecture=opened.architecture,
        model_class=plan.model_class,
        target=plan.target.name,
        tensors=len(plan.tensors),
        components=plan.components(),
        source_types=types,
        total_bytes=plan.total_bytes,
        source_bytes=sum(source.size for source in opened.sources),
        shards=len(plan.shards),
        seconds=time.monotonic() - started,
        peak_memory=plan.peak_memory,
        dropped=[(d.tensor.name, d.reason) for d in plan.resolution.dropped],
        warnings=warnings,
        differences=list(plan.differences),
        dry_run=dry_run,
    )


def run(plan: Plan, directory: Path, progress: ProgressCallback | None = None) -> list[str]:
    """Write every file of a plan into an existing directory; returns warnings about the values."""
    for name, text in plan.documents.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    writer = ShardWriter(directory, plan.shards)
    work = _Work(plan, writer, progress)
    try:
        with ThreadPoolExecutor(plan.threads, thread_name_prefix="gguf2st") as pool:
            workers = [pool.submit(work.drain) for _ in range(plan.threads)]
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
    return [
        f"tensor {name} has {count:,} values that aren't finite; the GGUF is damaged or its quantization failed"
        for name, count in work.broken.items()
    ]


class _Work:
    """Pieces of tensors, handed out to workers in the order of the files."""

    def __init__(self, plan: Plan, writer: ShardWriter, progress: ProgressCallback | None) -> None:
        self._plan, self._writer, self._progress = plan, writer, progress
        self._pieces = self._cut()
        self._lock = threading.Lock()
        self._stopped = False
        self._done = 0
        self._total = sum(t.placement.nbytes for t in plan.tensors)
        self.broken: dict[str, int] = {}

    def stop(self) -> None:
        """Let workers end after their current piece."""
        self._stopped = True

    def drain(self) -> None:
        """Take and write pieces until none is left."""
        while not self._stopped:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            try:
                self._write(*piece)
            except BaseException:
                self.stop()
                raise

    def _cut(self) -> Iterator[tuple[PlannedTensor, int, int]]:
        for tensor in self._plan.tensors:
            rows = tensor.placement.row_count
            step = max(1, CHUNK_ELEMENTS // tensor.placement.spec.shape[-1])
            for start in range(0, rows, step):
                yield tensor, start, min(rows, start + step)

    def _write(self, tensor: PlannedTensor, start: int, stop: int) -> None:
        placement, recipe = tensor.placement, tensor.recipe
        try:
            values = recipe.view().read(start, stop)
        except Gguf2stError:
            raise
        except ValueError as error:
            raise InputError(
                f"tensor {recipe.sources[0].tensor.name} of {recipe.sources[0].tensor.file.path} can't "
                f"become {recipe.name}: {error}; the file is damaged or its converter was faulty."
            ) from error
        encoded = self._plan.target.encode(placement.spec, values)
        row_bytes = placement.nbytes // placement.row_count
        self._writer.write(
            placement.shard, placement.offset + start * row_bytes, np.ascontiguousarray(encoded)
        )
        broken = values.size - int(np.isfinite(values).sum())
        with self._lock:
            if broken:
                self.broken[recipe.name] = self.broken.get(recipe.name, 0) + broken
            self._done += encoded.nbytes
            if self._progress is not None:
                self._progress(Progress(self._done, self._total, placement.spec.name))


def check_written(plan: Plan, directory: Path) -> None:
    """Read the shards' headers back with safetensors' own reader and compare them with the plan.

    Raises `VerificationError` naming the first tensor that differs.
    """
    expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        s.file_name: {} for s in plan.shards
    }
    for tensor in plan.tensors:
        spec = tensor.placement.spec
        expected[plan.shards[tensor.placement.shard].file_name][spec.name] = (
            spec.dtype,
            spec.shape,
        )
    for name, tensors in expected.items():
        try:
            with safe_open(directory / name, framework="np") as shard:
                slices = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118
                found = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
        except (SafetensorError, OSError) as error:
            raise VerificationError(
                f"{name} can't be read back ({error}); please report this."
            ) from error
        for key in found.keys() ^ tensors.keys():
            raise VerificationError(f"tensor {key} of {name} isn't as planned; please report this.")
        for key, value in tensors.items():
            if found[key] != value:
                raise VerificationError(
                    f"tensor {key} of {name} is {found[key]}, planned {value}; please report this."
                )
