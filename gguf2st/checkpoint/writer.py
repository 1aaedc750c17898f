"""Streaming safetensors shards, and a directory that appears only when complete.

safetensors' own writers want whole tensors in memory, so the header is laid out
here (format: 8-byte little-endian length, JSON, data without gaps; see the
`safetensors` crate's `serialize`), and rows are written at their final offsets
in any order.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf2st.errors import OutputError
from gguf2st.targets import DTYPE_BYTES, TensorSpec

HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies: its shard, and its first byte in that file."""

    spec: TensorSpec
    shard: int
    offset: int
    nbytes: int

    @property
    def row_count(self) -> int:
        """Rows of all leading axes together."""
        return math.prod(self.spec.shape[:-1])


@dataclass(frozen=True)
class Shard:
    """One safetensors file before its data: name, header and size in bytes."""

    file_name: str
    header: bytes
    nbytes: int


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor's data."""
    count = DTYPE_BYTES[spec.dtype]
    for extent in spec.shape:
        count *= extent
    return count


def lay_out(
    specs: Sequence[TensorSpec], maximum_bytes: int
) -> tuple[tuple[Placement, ...], tuple[Shard, ...]]:
    """Distribute tensors over shards of at most `maximum_bytes` (one tensor at least) and lay out each."""
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec_bytes(spec) > maximum_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec_bytes(spec)
    placements: list[Placement] = []
    shards: list[Shard] = []
    for number, group in enumerate(groups):
        name = (
            "model.safetensors"
            if len(groups) == 1
            else f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        )
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        relative: list[tuple[TensorSpec, int]] = []
        position = 0
        # Wide elements first keeps every tensor aligned to its element size.
        for spec in sorted(group, key=lambda spec: -DTYPE_BYTES[spec.dtype]):
            end = position + spec_bytes(spec)
            entries[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [position, end],
            }
            relative.append((spec, position))
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        placements += [Placement(s, number, len(header) + at, spec_bytes(s)) for s, at in relative]
        shards.append(Shard(name, header, len(header) + position))
    return tuple(placements), tuple(shards)


def index_document(
    placements: Sequence[Placement], shards: Sequence[Shard]
) -> dict[str, Any] | None:
    """Content of model.safetensors.index.json; None for a single shard."""
    if len(shards) == 1:
        return None
    names = {p.spec.name: shards[p.shard].file_name for p in placements}
    return {
        "metadata": {"total_size": sum(p.nbytes for p in placements)},
        "weight_map": dict(sorted(names.items())),
    }


class ShardWriter:
    """The shards of one checkpoint, open for writing at any offset from any thread."""

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        self._descriptors: list[int] = []
        self._seeking = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            for number, shard in enumerate(shards):
                descriptor = os.open(directory / shard.file_name, flags, 0o644)
                self._descriptors.append(descriptor)
                os.truncate(descriptor, shard.nbytes)
                self.write(number, 0, shard.header)
        except BaseException:
            self.close(durable=False)
            raise

    def write(self, shard: int, offset: int, data: Any) -> None:
        """Write a buffer at a byte offset of a shard."""
        view = memoryview(data).cast("B")
        while view:
            done = self._write_some(self._descriptors[shard], view, offset)
            if hasattr(os, "posix_fadvise"):
                # The disk begins now, not when memory is full of what waits for it.
                advice = os.POSIX_FADV_DONTNEED
                os.posix_fadvise(self._descriptors[shard], offset, done, advice)
            view, offset = view[done:], offset + done

    def _write_some(self, descriptor: int, view: memoryview, offset: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(descriptor, view, offset)
        with self._seeking:  # Windows has no write at an offset
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.write(descriptor, view)

    def close(self, *, durable: bool) -> None:
        """Close all shards, after forcing them to the disk when `durable`."""
        try:
            if durable:
                for descriptor in self._descriptors:
                    os.fsync(descriptor)
        finally:
            while self._descriptors:
                os.close(self._descriptors.pop())


@contextlib.contextmanager
def appearing_directory(final: Path, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """A temporary directory beside `final` that takes its name when the block ends well.

    Whatever goes wrong, interruption included, nothing is left behind and an
    existing directory stays as it was. Raises `OutputError` when `final` exists
    (unless `force` and it looks like a checkpoint) or the disk is too small.
    """
    check_output(final, force=force)
    partial = final.parent / f".{final.name}.partial-{os.getpid()}"
    made: list[Path] = []
    try:
        for parent in (final.parent, *final.parent.parents):
            if os.path.lexists(parent):
                break
            made.append(parent)
        final.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(final.parent).free
        if needed_bytes > free:
            raise OutputError(
                f"{final} needs {needed_bytes / 1e9:.2f} GB but {final.parent} has "
                f"{free / 1e9:.2f} GB free; make room or choose another place with -o."
            )
        partial.mkdir()
        made.insert(0, partial)
        yield partial
        check_output(final, force=force)
        _take_name(partial, final)
        made.clear()
    except OSError as error:
        raise OutputError(
            f"{final} can't be written ({error.strerror or error}); check space and permissions of "
            f"{final.parent}."
        ) from error
    finally:
        if made[:1] == [partial]:
            shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def check_output(final: Path, *, force: bool) -> None:
    """Raise `OutputError` when the output may not be written to `final`."""
    try:
        final.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise OutputError(
            f"{final} can't be written ({error.strerror}); choose another place with -o."
        ) from error
    if not force:
        raise OutputError(
            f"{final} exists already; choose another place with -o, or replace it with --force."
        )
    if not _may_be_replaced(final):
        raise OutputError(
            f"{final} exists and isn't a checkpoint directory (config.json and *.safetensors), so --force "
            "leaves it alone; choose another place with -o."
        )


def _may_be_replaced(final: Path) -> bool:
    """Whether it is an empty directory or one with a checkpoint, and not a link to one."""
    if final.is_symlink() or not final.is_dir():
        return False
    try:
        names = {path.name for path in final.iterdir()}
    except OSError:
        return False
    weights = any(name.endswith(".safetensors") for name in names)
    return not names or (weights and "config.json" in names)


def _take_name(partial: Path, final: Path) -> None:
    if not final.exists():
        partial.rename(final)
        return
    replaced = final.parent / f".{final.name}.replaced-{os.getpid()}"
    final.rename(replaced)
    try:
        partial.rename(final)
    except BaseException:
        replaced.rename(final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
