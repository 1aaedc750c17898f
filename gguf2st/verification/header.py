"""Reads the header of a safetensors file and notes everything that is wrong with it.

Format (safetensors' `tensor.rs`): 8 bytes little-endian length, JSON, then the data without
gaps. safetensors' own reader stops at the first mistake and wants the whole file; this one
goes on, so that a report can say all, and takes a file of which only the header is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

# tensor.rs MAX_HEADER_SIZE
LONGEST_HEADER = 100_000_000
# Names of dtypes -> bits of one element (tensor.rs Dtype::bitsize).
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_MOST_AXES = 16


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: safetensors' dtype, shape in torch order, first byte and bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file, and with which of its tensors ("": with the file itself)."""

    file: str
    tensor: str
    text: str


@dataclass
class Header:
    """What a file says it holds. `missing_bytes` of its data aren't there."""

    file: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    data_start: int = 0
    data_bytes: int = 0
    file_bytes: int = 0

    @property
    def missing_bytes(self) -> int:
        """Bytes of data that the header announces beyond the end of the file."""
        return max(0, self.data_start + self.data_bytes - self.file_bytes)

    @property
    def without_data(self) -> bool:
        """Whether the file ends where its data would begin."""
        return self.data_bytes > 0 and self.file_bytes <= self.data_start


def read_header(path: Path) -> Header:
    """Read one file's header. Mistakes become `problems`; raises `OSError` alone."""
    header = Header(path.name)
    with path.open("rb") as stream:
        header.file_bytes = path.stat().st_size
        first = stream.read(8)
        if len(first) < 8:
            _note(header, f"the file has {header.file_bytes} bytes, too few for a header")
            return header
        length = int.from_bytes(first, "little")
        if length > min(LONGEST_HEADER, header.file_bytes - 8):
            _note(
                header,
                f"its first 8 bytes announce a header of {length:,} bytes, and the file has "
                f"{header.file_bytes:,}",
            )
            return header
        text = stream.read(length)
    header.data_start = 8 + length
    entries = _decoded(header, text)
    for name, entry in entries:
        if name == "__metadata__":
            _take_metadata(header, entry)
        elif name in header.tensors:
            _note(header, "the header names it twice", name)
        else:
            _take_tensor(header, name, entry)
    _check_layout(header)
    return header


def _decoded(header: Header, text: bytes) -> list[tuple[str, Any]]:
    """Entries of the header in their order; a name that comes twice is there twice."""
    outermost: list[tuple[str, Any]] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        # The outermost object is the last one to be complete.
        outermost[:] = found
        return dict(found)

    if not text.startswith(b"{"):
        _note(header, "the header isn't a JSON object")
        return []
    try:
        json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        _note(header, f"the header isn't JSON ({' '.join(str(error).split())[:80]})")
        return []
    return outermost


def _take_metadata(header: Header, entry: Any) -> None:
    if isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values()):
        header.metadata = entry
    else:
        _note(header, "__metadata__ must map names to texts")


def _take_tensor(header: Header, name: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        return _note(header, "its entry isn't an object", name)
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        return _note(header, f"dtype {str(dtype)[:40]!r} isn't one of safetensors'", name)
    if not _counts(shape) or len(shape) > _MOST_AXES:
        return _note(header, f"shape {str(shape)[:40]} isn't a list of sizes", name)
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return _note(header, f"data_offsets {str(offsets)[:60]} aren't a begin and an end", name)
    start, stop = offsets
    header.tensors[name] = Tensor(
        name, dtype, tuple(shape), header.file, header.data_start + start, stop - start
    )
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (stop - start):
        _note(
            header,
            f"{dtype} of shape {list(shape)} takes {bits // 8:,} bytes, and its offsets span "
            f"{stop - start:,}",
            name,
        )
    return None


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63 for v in value
    )


def _check_layout(header: Header) -> None:
    """Tensors follow one another without a gap (tensor.rs Metadata::validate)."""
    position = header.data_start
    for tensor in sorted(header.tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            what = "overlaps another tensor" if tensor.offset < position else "lies behind a gap"
            _note(
                header, f"it {what}, at byte {tensor.offset:,} instead of {position:,}", tensor.name
            )
        position = max(position, tensor.offset + tensor.nbytes)
    header.data_bytes = position - header.data_start
    if header.file_bytes > position and not header.problems:
        _note(header, f"{header.file_bytes - position:,} bytes follow the last tensor")


def _note(header: Header, text: str, tensor: str = "") -> None:
    header.problems.append(Problem(header.file, tensor, text))


def in_order(header: Header) -> Iterator[Tensor]:
    """Tensors as they lie in the file."""
    return iter(sorted(header.tensors.values(), key=lambda tensor: tensor.offset))
