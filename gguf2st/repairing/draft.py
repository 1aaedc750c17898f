"""A checkpoint as it is to become: changed step by step, and looked at like one that lies on disk."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gguf2st.verification.checkpoint import INDEX, QUANTIZATION_KEYS, CheckpointView
from gguf2st.verification.decoding import Decoding
from gguf2st.verification.header import BITS, Header, Tensor, in_order
from gguf2st.verification.stored import Stored

CONFIG = "config.json"
_ALIGNMENT = 8


@dataclass(frozen=True)
class Copied:
    """Bytes of the input: (file, first byte, bytes), one range after the other."""

    ranges: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Decoded:
    """Weights of a quantized matrix of the input."""

    matrix: Stored
    decoding: Decoding


@dataclass(frozen=True)
class Cast:
    """Elements of a floating-point tensor of the input."""

    tensor: Tensor


@dataclass(frozen=True)
class Given:
    """Bytes that the input doesn't hold."""

    data: bytes


@dataclass(frozen=True)
class Joined:
    """Several, one after the other."""

    parts: tuple[Copied | Decoded | Cast, ...]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the output: safetensors' dtype, shape in torch order, and where it comes from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: Copied | Decoded | Cast | Given | Joined

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class PlannedShard:
    """A safetensors file of the output: `header` with its length before it, tensors as they follow."""

    file: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass
class Draft:
    """What the output will hold. `original` is the input; tensors are those of each file by name."""

    original: CheckpointView
    shards: dict[str, dict[str, PlannedTensor]]
    config: dict[str, Any] | None
    changed: set[str] = field(default_factory=set)  # files whose tensors aren't those of the input
    left_out: set[str] = field(default_factory=set)  # files
    reindexed: bool = False

    def find(self, name: str) -> list[str]:
        """Files that hold a tensor."""
        return [file for file, tensors in self.shards.items() if name in tensors]

    def get(self, name: str) -> PlannedTensor:
        """A tensor, the first of that name. Raises `KeyError`."""
        return self.shards[self.find(name)[0]][name]

    def substitute(self, others: Mapping[str, Sequence[PlannedTensor]]) -> None:
        """Put others (or none) in the places of tensors, by their names."""
        for file, tensors in self.shards.items():
            if tensors.keys().isdisjoint(others):
                continue
            held: dict[str, PlannedTensor] = {}
            for name, tensor in tensors.items():
                for new in others.get(name, (tensor,)):
                    held[new.name] = new
            self.shards[file] = held
            self.changed.add(file)

    def drop(self, name: str, *, keep: str = "") -> None:
        """Leave a tensor out, in all files but one."""
        for file in self.find(name):
            if file != keep:
                del self.shards[file][name]
                self.changed.add(file)

    def set(self, key: str, value: Any) -> None:
        """Give a dotted key of config.json a value (None: remove it)."""
        if self.config is None:
            return
        *path, last = key.split(".")
        section = self.config
        for part in path:
            inner = section.get(part)
            if not isinstance(inner, dict):
                if value is None:
                    return
                inner = section[part] = {}
            section = inner
        if value is None:
            section.pop(last, None)
        else:
            section[last] = copy.deepcopy(value)

    def set_quantization(self, quantization: Mapping[str, Any] | None) -> None:
        """The one quantization_config, at the top of config.json; None: there is none."""
        if self.config is None:
            return
        for section in [self.config, *self.config.values()]:
            for key in QUANTIZATION_KEYS:
                if isinstance(section, dict) and (
                    section is not self.config or key != "quantization_config"
                ):
                    section.pop(key, None)
        if quantization is None:
            self.config.pop("quantization_config", None)
        else:
            self.config["quantization_config"] = dict(quantization)

    def origin(self, name: str) -> Tensor:
        """The whole tensor of the input that one of the draft is. Raises `LookupError` if none is."""
        tensor = self.get(name)
        if isinstance(tensor.source, Copied) and len(tensor.source.ranges) == 1:
            [(file, offset, nbytes)] = tensor.source.ranges
            return Tensor(name, tensor.dtype, tensor.shape, file, offset, nbytes)
        raise LookupError(name)

    def unchanged(self, file: str) -> bool:
        """Whether a safetensors file stays as it is."""
        return file not in self.changed

    def laid_out(self, file: str) -> PlannedShard:
        """The file as it is to be written."""
        # Wide elements first keeps every tensor aligned to its element size.
        tensors = tuple(sorted(self.shards[file].values(), key=lambda t: -BITS[t.dtype]))
        metadata = next((h.metadata for h in self._headers() if h.file == file), {})
        entries: dict[str, Any] = {"__metadata__": dict(metadata) or {"format": "pt"}}
        position = 0
        for tensor in tensors:
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [position, position := position + tensor.nbytes],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return PlannedShard(file, len(text).to_bytes(8, "little") + text, tensors)

    def files(self) -> list[str]:
        """Safetensors files that engines load, those without a tensor left out."""
        return [file for file, tensors in self.shards.items() if tensors or self.unchanged(file)]

    def index(self) -> dict[str, Any] | None:
        """What the index says, or None where there is none and none is needed."""
        there = INDEX in self.original.files
        if not (there or self.reindexed):
            return None
        old = self.original.documents.get(INDEX)
        if there and not (self.reindexed or self.changed or self.left_out):
            return old if isinstance(old, dict) else None
        metadata = old.get("metadata") if isinstance(old, dict) else None
        files = self.files()
        places = {name: file for file in files for name in self.shards[file]}
        total = sum(tensor.nbytes for file in files for tensor in self.shards[file].values())
        kept = metadata if isinstance(metadata, dict) else {}
        return {
            "metadata": kept | {"total_size": total},
            "weight_map": dict(sorted(places.items())),
        }

    def documents(self) -> dict[str, Any]:
        """JSON files whose content changes, with that."""
        found: dict[str, Any] = {}
        original = self.original.documents
        if self.config is not None and self.config != original.get(CONFIG):
            found[CONFIG] = self.config
        index = self.index()
        if index is not None and index != original.get(INDEX):
            found[INDEX] = index
        return found

    def view(self) -> CheckpointView:
        """The output as rules look at it."""
        original = self.original
        documents = {n: d for n, d in original.documents.items() if n not in self.left_out}
        documents |= copy.deepcopy(self.documents())
        files = self.files()
        gone = {file for file in self.shards if file not in files} | self.left_out
        by_file = {header.file: header for header in self._headers()}
        return CheckpointView(
            original.directory,
            (original.files - gone) | documents.keys(),
            documents,
            {n: text for n, text in original.unreadable.items() if documents.get(n) is None},
            tuple(self._header(by_file[file]) for file in files),
            tuple(h for h in original.strays if h.file not in gone and h.file not in self.shards),
            original.headers_only,
        )

    def _headers(self) -> tuple[Header, ...]:
        return (*self.original.headers, *self.original.strays)

    def _header(self, old: Header) -> Header:
        if self.unchanged(old.file):
            return old
        shard = self.laid_out(old.file)
        start = position = len(shard.header)
        tensors = {}
        for tensor in shard.tensors:
            size = tensor.nbytes
            tensors[tensor.name] = Tensor(
                tensor.name, tensor.dtype, tensor.shape, old.file, position, size
            )
            position += size
        return Header(
            old.file,
            tensors,
            old.metadata,
            old.problems,
            start,
            position - start,
            position - old.missing_bytes,
        )


def drafted(view: CheckpointView) -> Draft:
    """The input as it is."""
    config = view.documents.get(CONFIG)
    return Draft(
        view,
        {header.file: planned(header) for header in view.headers},
        copy.deepcopy(config) if isinstance(config, dict) else None,
    )


def planned(header: Header) -> dict[str, PlannedTensor]:
    """The tensors of a file, to be copied, in the order in which they lie there."""
    return {
        tensor.name: PlannedTensor(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            Copied(((tensor.file, tensor.offset, tensor.nbytes),)),
        )
        for tensor in in_order(header)
    }
