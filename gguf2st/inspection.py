"""What is in a GGUF, and what is supported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf2st.errors import InputError
from gguf2st.gguf import open_source
from gguf2st.mapping import load_tables
from gguf2st.report import FileReport


def inspect(path: str | os.PathLike[str]) -> FileReport:
    """Describe a GGUF from its header; no weight is read.

    Raises `InputError` or `UnsupportedError` as opening it does.
    """
    source = open_source(path)
    metadata, first = source.metadata, source.files[0]
    try:
        role, architecture = source.role, source.architecture
    except InputError:
        role, architecture = str(metadata.get("general.type", "unknown")), "none named"

    def number(key: str) -> int | None:
        value = metadata.get(f"{architecture}.{key}")
        return value if isinstance(value, int) else None

    projector = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    known = {name for table in load_tables() for name in (*table.architectures, *table.projectors)}
    length = getattr(metadata, "length", lambda _key: None)
    return FileReport(
        path=Path(path),
        role=role,
        architecture=architecture,
        version=first.version,
        big_endian=first.big_endian,
        name=metadata.get("general.name"),
        supported=(projector or architecture) in known,
        files=[file.path.name for file in source.files],
        size=source.size,
        tensors=len(source.tensors),
        parameters=sum(tensor.elements for tensor in source.tensors.values()),
        types=source.type_histogram(),
        blocks=number("block_count"),
        mtp_layers=number("nextn_predict_layers") or 0,
        context_length=number("context_length"),
        vision=_vision(metadata, projector),
        tokenizer=_tokenizer(metadata),
        vocabulary=length("tokenizer.ggml.tokens"),
        chat_template="tokenizer.chat_template" in metadata,
    )


def _vision(metadata: Any, projector: str | None) -> str | None:
    if projector is None:
        return None
    blocks = metadata.get("clip.vision.block_count")
    width = metadata.get("clip.vision.embedding_length")
    return f"{projector}, {blocks} blocks of width {width}"


def _tokenizer(metadata: Any) -> str | None:
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre")
    return f"{model} ({pre})" if model and pre else model


@dataclass(frozen=True)
class Supported:
    """One mapping table and what it serves."""

    table: str
    family: str
    architectures: tuple[str, ...]
    projectors: tuple[str, ...]


def architectures() -> list[Supported]:
    """All architectures and projectors that mapping tables serve."""
    return [
        Supported(table.name, table.family, table.architectures, table.projectors)
        for table in load_tables()
    ]
