"""A checkpoint directory as it lies on disk: one read-only view that all rules look at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf2st.errors import InputError
from gguf2st.verification.header import Header, Tensor, read_header

INDEX = "model.safetensors.index.json"
# A config of a few megabytes is a list of every expert of a large model; more is none.
_LONGEST_JSON = 256 << 20
# A vocabulary of 262,144 tokens takes a second to parse, and 200 MB.
_VOCABULARY, _LONG_VOCABULARY = "tokenizer.json", 4 << 20
# Where a quantization_config may be, in the order in which engines look
# (vLLM: config/model.py _parse_quant_hf_config, transformers_utils/config.py get_config;
# SGLang: configs/model_config.py _parse_quant_hf_config; transformers: the first alone).
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


@dataclass(frozen=True)
class CheckpointView:
    """All that can be known without reading values.

    `files` are the names of all files, `texts` what JSON files hold (None: they can't be
    parsed, `unreadable` says why). `headers` are those of the safetensors files that an engine
    loads, `strays` those that lie beside the index without being named in it.
    """

    directory: Path
    files: frozenset[str]
    documents: Mapping[str, Any]
    unreadable: Mapping[str, str]
    headers: tuple[Header, ...]
    strays: tuple[Header, ...] = ()
    headers_only: bool = False

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json; empty where there is none."""
        found = self.documents.get("config.json")
        return found if isinstance(found, dict) else {}

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The part of config.json that describes the language model."""
        found = self.config.get("text_config")
        return found if isinstance(found, dict) else self.config

    @cached_property
    def model_class(self) -> str:
        """The first of `architectures`, or ""."""
        found = self.config.get("architectures")
        return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""

    @cached_property
    def quantization_places(self) -> Mapping[str, Mapping[str, Any]]:
        """Where a quantization_config is ("config.json: quantization_config") -> what it says."""
        places: dict[str, Any] = {}
        for key in QUANTIZATION_KEYS:
            places[f"config.json: {key}"] = self.config.get(key)
        for part in ("text_config", "vision_config", "llm_config"):
            inner = self.config.get(part)
            if isinstance(inner, dict):
                for key in QUANTIZATION_KEYS:
                    places[f"config.json: {part}.{key}"] = inner.get(key)
        for name in QUANTIZATION_FILES:
            places[name] = self.documents.get(name)
        return {
            place: found for place, found in places.items() if isinstance(found, dict) and found
        }

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization_config that engines find; empty where there is none."""
        for key in QUANTIZATION_KEYS:
            found = self.config.get(key)
            if isinstance(found, dict) and found:
                return found
        return {}

    @cached_property
    def method(self) -> str:
        """`quant_method`, or "" for an unquantized checkpoint."""
        found = self.quantization.get("quant_method")
        if isinstance(found, str):
            return found
        return "compressed-tensors" if "config_groups" in self.quantization else ""

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor of all files that an engine loads; of duplicates the first."""
        found: dict[str, Tensor] = {}
        for header in self.headers:
            for name, tensor in header.tensors.items():
                found.setdefault(name, tensor)
        return found

    @cached_property
    def weight_map(self) -> Mapping[str, str] | None:
        """Tensor -> file as the index says, or None without an index."""
        index = self.documents.get(INDEX)
        found = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(found, dict):
            return None
        return {name: file for name, file in found.items() if isinstance(file, str)}


def open_checkpoint(directory: Path, *, headers_only: bool = False) -> CheckpointView:
    """Read the JSON files and headers of a directory.

    With `headers_only` files may end before their data do; files that end right behind their
    header are taken for that anyway. Raises `InputError` where there is no checkpoint at all.
    """
    try:
        files = frozenset(
            str(path.relative_to(directory)) for path in directory.iterdir() if path.is_file()
        )
    except OSError as error:
        raise InputError(f"{directory} can't be read ({error.strerror}).") from error
    documents: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for name in sorted(files):
        if name.endswith(".json"):
            try:
                documents[name] = _json(directory / name)
            except (ValueError, RecursionError, OSError) as error:
                documents[name] = None
                unreadable[name] = " ".join(str(error).split())[:100]
    weights = sorted(name for name in files if name.endswith(".safetensors"))
    if not weights and "config.json" not in files:
        raise InputError(
            f"{directory} has neither config.json nor a safetensors file; give the directory of a "
            "Hugging Face checkpoint."
        )
    try:
        headers = {name: read_header(directory / name) for name in weights}
    except OSError as error:
        raise InputError(f"{error.filename} can't be read ({error.strerror}).") from error
    index = documents.get(INDEX)
    named = index.get("weight_map") if isinstance(index, dict) else None
    loaded = set(map(str, named.values())) if isinstance(named, dict) else set(headers)
    return CheckpointView(
        directory,
        files,
        documents,
        unreadable,
        tuple(header for name, header in headers.items() if name in loaded),
        tuple(header for name, header in headers.items() if name not in loaded),
        headers_only or any(header.without_data for header in headers.values()),
    )


def _json(path: Path) -> Any:
    size = path.stat().st_size
    if size > _LONGEST_JSON:
        raise ValueError(f"{size:,} bytes are too many")
    if path.name == _VOCABULARY and size > _LONG_VOCABULARY:
        return _looked_at(path)
    return json.loads(path.read_text("utf-8"))


def _looked_at(path: Path) -> dict[str, Any]:
    """An empty object in place of one whose contents no rule wants, if it begins and ends as one."""
    with path.open("rb") as file:
        first = file.read(64).lstrip()[:1]
        file.seek(-64, os.SEEK_END)
        last = file.read().rstrip()[-1:]
    if (first, last) != (b"{", b"}"):
        raise ValueError(f"it begins with {first!r} and ends with {last!r}, not with braces")
    return {}
