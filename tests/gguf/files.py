"""GGUF files for the tests: sound ones by gguf-py's writer, broken ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

UINT32, STRING, ARRAY = 4, 8, 9
F32, F16, Q8_0, Q4_K, BF16 = 0, 1, 8, 12, 30


def string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: bytes | str, value_type: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", value_type) + payload


def text_key(name: str, text: bytes | str) -> bytes:
    return key(name, STRING, string(text))


def number_key(name: str, number: int) -> bytes:
    return key(name, UINT32, struct.pack("<I", number))


def array_key(name: str, item_type: int, count: int, items: bytes) -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", item_type, count) + items)


def entry(name: bytes | str, extents: Sequence[int], code: int = F32, offset: int = 0) -> bytes:
    """A tensor's line in the index; `extents` as in the file, fastest axis first."""
    shape = struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
    return string(name) + shape + struct.pack("<IQ", code, offset)


def craft(
    keys: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole little-endian file of lines made by the functions above."""
    keys, tensors = list(keys), list(tensors)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(
    path: Path,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    *,
    architecture: str = "llama",
    alignment: int | None = None,
    **options: Any,
) -> Path:
    """A file by gguf-py's own writer.

    A key's value is a str, int, float or list, or a tuple of (value, type) or (items, type of
    an array, type of its items). A tensor is an array, or a tuple of (raw bytes, block type).
    """
    writer = gguf.GGUFWriter(path, architecture, **options)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, value in (keys or {}).items():
        parts = value if isinstance(value, tuple) else (value, gguf.GGUFValueType.get_type(value))
        writer.add_key_value(name, *parts)
    for name, tensor in (tensors or {}).items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
