"""Writes a repaired checkpoint: what changes is streamed, what doesn't is linked or copied."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gguf2st.errors import InputError, VerificationError
from gguf2st.repairing.draft import (
    Cast,
    Copied,
    Decoded,
    Given,
    Joined,
    PlannedShard,
    PlannedTensor,
)
from gguf2st.repairing.plan import RepairPlan
from gguf2st.verification.decoding import decoded
from gguf2st.verification.numbers import rounded
from gguf2st.verification.reading import float_chunks

CHUNK_BYTES = 8 << 20
# Linux: linux/fs.h FICLONE, the same on all architectures that have reflinks.
_CLONE = 0x40049409
# Larger files are weights, and nobody edits those in place.
_LINKED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


def write(plan: RepairPlan, target: Path) -> dict[str, int]:
    """Fill a directory; how many files were "rewritten", "linked", "reflinked" and "copied".

    Raises `InputError` for input that can't be read and `OSError` for output that can't be written.
    """
    counts: Counter[str] = Counter()
    for shard in plan.shards:
        _write_shard(plan.directory, shard, target / shard.file)
        counts["rewritten"] += 1
    for name, content in plan.documents.items():
        text = json.dumps(content, indent=2) + "\n"
        (target / name).write_text(text, "utf-8")
        counts["rewritten"] += 1
    for name in others(plan):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        counts[_take_over(plan.directory / name, target / name)] += 1
    return dict(counts)


def others(plan: RepairPlan) -> list[str]:
    """Files that come along as they are; hidden directories don't."""
    written = {shard.file for shard in plan.shards} | plan.documents.keys() | set(plan.left_out)
    found = []
    for folder, folders, files in os.walk(plan.directory, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            relative = str((Path(folder) / name).relative_to(plan.directory))
            if relative not in written:
                found.append(relative)
    return found


def needed_bytes(plan: RepairPlan, target: Path) -> int:
    """Room that the output takes: nothing for what can be linked on the same file system."""
    total = plan.rewritten_bytes
    parent = next(p for p in target.absolute().parents if p.exists())
    same = parent.stat().st_dev
    for name in others(plan):
        with contextlib.suppress(OSError):
            status = (plan.directory / name).stat()
            if not (name.endswith(_LINKED) and status.st_dev == same):
                total += status.st_size
    return total


def _take_over(source: Path, target: Path) -> str:
    """Link weights, where that can be; clone or copy all else, which people edit in place."""
    try:
        real = source.resolve(strict=True)  # caches of downloads hold links
        if real.suffix in _LINKED or source.suffix in _LINKED:
            with contextlib.suppress(OSError):
                os.link(real, target)
                return "linked"
        if _cloned(real, target):
            return "reflinked"
    except OSError as error:
        raise InputError(f"{source} can't be read ({error.strerror}).") from error
    shutil.copyfile(real, target)
    return "copied"


def _cloned(source: Path, target: Path) -> bool:
    """Share the blocks of a file, where the file system can."""
    if not sys.platform.startswith("linux"):
        return False
    import fcntl  # noqa: PLC0415  # not everywhere

    with source.open("rb") as one, target.open("wb") as other:
        try:
            fcntl.ioctl(other.fileno(), _CLONE, one.fileno())
        except OSError:
            return False
    return True


def _write_shard(directory: Path, shard: PlannedShard, target: Path) -> None:
    with target.open("xb") as stream:
        stream.write(shard.header)
        for tensor in shard.tensors:
            before = stream.tell()
            for piece in _content(directory, tensor, tensor.source):
                stream.write(piece)
            if stream.tell() - before != tensor.nbytes:
                raise InputError(
                    f"tensor {tensor.name} ends early: a file of {directory} is shorter than its header "
                    "says; fetch it again."
                )
        stream.flush()
        os.fsync(stream.fileno())


def _content(directory: Path, tensor: PlannedTensor, source: Any) -> Iterator[bytes]:
    match source:
        case Copied(ranges):
            for file, offset, nbytes in ranges:
                with _open(directory / file) as stream:
                    yield from _range(stream, offset, nbytes)
        case Decoded(matrix, decoding):
            for rows in decoded(directory, matrix, decoding):
                yield _bytes(rows, tensor)
        case Cast(original):
            for chunk in float_chunks(directory, original):
                yield _bytes(chunk, tensor)
        case Given(data):
            yield data
        case Joined(parts):
            for part in parts:
                yield from _content(directory, tensor, part)


def _bytes(values: npt.NDArray[np.float32], tensor: PlannedTensor) -> bytes:
    found = np.asarray(rounded(np.ascontiguousarray(values), tensor.dtype))
    if tensor.dtype == "F16" and np.isinf(found.astype(np.float32)).sum() > np.isinf(values).sum():
        raise VerificationError(
            f"tensor {tensor.name} has values that float16 can't hold; set dtype to bfloat16 in "
            "config.json, and repair again."
        )
    return found.tobytes()


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}).") from error


def _range(stream: IO[bytes], offset: int, nbytes: int) -> Iterator[bytes]:
    stream.seek(offset)
    while nbytes > 0:
        chunk = stream.read(min(CHUNK_BYTES, nbytes))
        if not chunk:
            return
        yield chunk
        nbytes -= len(chunk)
