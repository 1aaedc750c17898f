"""Several GGUF files seen as one model: split shards, mmproj, separate MTP file.

The shards of a split file are described by their own `split.*` keys, written by
llama.cpp's `gguf-split`; only the first one holds the model's keys.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf2st.errors import InputError, UnsupportedError, UsageError
from gguf2st.gguf.container import GgufFile, TensorInfo

SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z")
PROJECTOR_ARCHITECTURE = "clip"


@dataclass(frozen=True)
class GgufSource:
    """One logical GGUF: a single file, or the shards of a split one.

    `tensors` keeps the order of the files.
    """

    path: Path
    files: tuple[GgufFile, ...]
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as "qwen35" or "clip"."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise InputError(
                f"{self.path} has no general.architecture key, so nothing says what model it is; "
                "convert it again with llama.cpp."
            )
        return value

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files)

    @property
    def role(self) -> str:
        """What the file is for: "model", "mmproj", "mtp", "vocabulary", "adapter" or "imatrix"."""
        declared = self.metadata.get("general.type")
        if declared in ("adapter", "imatrix"):
            return str(declared)
        if self.architecture == PROJECTOR_ARCHITECTURE or declared == "mmproj":
            return "mmproj"
        if not self.tensors:
            return "vocabulary"
        # llama.cpp knows a draft-head file by its missing trunk too.
        if self.mtp_depth and "blk.0.attn_norm.weight" not in self.tensors:
            return "mtp"
        return "model"

    @property
    def mtp_depth(self) -> int:
        """Number of multi-token-prediction blocks that the keys claim."""
        return self.whole_number(f"{self.architecture}.nextn_predict_layers")

    def whole_number(self, key: str, default: int = 0) -> int:
        """The integer at `key`. Raises `InputError` when something else is there."""
        return _whole_number(self.path, self.metadata, key, default)

    def type_histogram(self) -> dict[str, tuple[int, int]]:
        """Block type -> (number of tensors, bytes), most bytes first."""
        tensors: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            tensors[tensor.kind.name] += 1
            nbytes[tensor.kind.name] += tensor.nbytes
        return {name: (tensors[name], size) for name, size in nbytes.most_common()}


@dataclass(frozen=True)
class GgufModel:
    """A language model with the files that belong to it.

    `tensors` and `metadata` are the language model's, with the blocks of a
    separate MTP file added; `projector` stays apart, since its names are its own.
    `left_out` says why tensors of the files are in neither.
    """

    language: GgufSource
    projector: GgufSource | None
    mtp: GgufSource | None
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorInfo]
    left_out: tuple[tuple[TensorInfo, str], ...] = field(default=())

    @property
    def architecture(self) -> str:
        """`general.architecture` of the language model."""
        return self.language.architecture

    @property
    def sources(self) -> tuple[GgufSource, ...]:
        """All logical files, the language model first."""
        return tuple(s for s in (self.language, self.mtp, self.projector) if s is not None)

    def without_mtp(self) -> GgufModel:
        """The same model with the tensors of its MTP blocks left out."""
        depth = int(self.metadata.get(f"{self.architecture}.nextn_predict_layers", 0))
        first = int(self.metadata.get(f"{self.architecture}.block_count", 0)) - depth
        kept: dict[str, TensorInfo] = {}
        left_out = list(self.left_out)
        for name, tensor in self.tensors.items():
            block = re.match(r"blk\.(\d+)\.", name)
            if depth and block is not None and int(block[1]) >= first:
                left_out.append((tensor, "MTP block, left out on request"))
            else:
                kept[name] = tensor
        return replace(self, tensors=kept, left_out=tuple(left_out))


def _whole_number(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int):
        raise InputError(
            f"{path} has {value!r:.60} at the key {key}, where a whole number belongs; "
            "convert it again with llama.cpp."
        )
    return value


def open_source(path: str | os.PathLike[str]) -> GgufSource:
    """Open one GGUF, or all shards of a split one from any of them.

    Raises `InputError` when a shard is missing, foreign or doubled.
    """
    path = Path(path)
    if os.path.isdir(path):  # noqa: PTH112  # Path.is_dir raises for a name that is too long
        raise UsageError(f"{path} is a directory; give the GGUF file in it.")
    first = GgufFile(path)
    count = _whole_number(path, first.metadata, "split.count", 1)
    if count <= 1:
        return GgufSource(path, (first,), first.metadata, first.tensors)
    return _join_shards(path, first, count)


def _join_shards(path: Path, given: GgufFile, count: int) -> GgufSource:
    name = SHARD_NAME.match(path.name)
    if name is None or int(name["count"]) != count:
        raise InputError(
            f"{path} is one of {count} shards, but its name doesn't end in -NNNNN-of-{count:05}.gguf, so "
            "the others can't be found; give the shards back the names that they were published with."
        )
    total = _whole_number(path, given.metadata, "split.tensors.count", 0)
    shards: list[GgufFile] = []
    for number in range(count):
        shard_path = path.with_name(f"{name['stem']}-{number + 1:05}-of-{count:05}.gguf")
        if not shard_path.exists():
            raise InputError(
                f"shard {number + 1} of {count} is missing: {shard_path} isn't there; fetch it too."
            )
        shard = given if shard_path == path else GgufFile(shard_path)
        claims = [shard.metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count")]
        if claims != [number, count, total]:
            raise InputError(
                f"{shard_path} doesn't belong to the set of {path}: its split.no, split.count and "
                f"split.tensors.count are {claims}, expected {[number, count, total]}; "
                "fetch the shards from one place."
            )
        shards.append(shard)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        if doubled := tensors.keys() & shard.tensors.keys():
            raise InputError(
                f"{shard.path} and an earlier shard both hold tensor {min(doubled)}; "
                "the shards are of different models, fetch them from one place."
            )
        tensors |= shard.tensors
    if len(tensors) != total:
        raise InputError(
            f"the {count} shards of {path} hold {len(tensors)} tensors but claim {total}; "
            "they are of different models or incomplete, fetch them again."
        )
    return GgufSource(path, tuple(shards), shards[0].metadata, tensors)


class _Overlay(Mapping[str, Any]):
    """Metadata with some keys replaced, still lazily decoded."""

    def __init__(self, base: Mapping[str, Any], replaced: dict[str, Any]) -> None:
        self._base, self._replaced = base, replaced

    def __getitem__(self, key: str) -> Any:
        return self._replaced[key] if key in self._replaced else self._base[key]

    def __iter__(self) -> Any:
        return iter(dict.fromkeys([*self._base, *self._replaced]))

    def __len__(self) -> int:
        return len(self._base.keys() | self._replaced.keys())


def open_model(
    path: str | os.PathLike[str],
    mmproj: str | os.PathLike[str] | None = None,
    mtp: str | os.PathLike[str] | None = None,
) -> GgufModel:
    """Open a model and the files that go with it.

    Raises `UsageError` when a file is given in the wrong place or the files
    don't belong together, `InputError` when one is damaged.
    """
    language = open_source(path)
    _expect_role(language, "model", "as the model")
    projector = open_source(mmproj) if mmproj is not None else None
    if projector is not None:
        _expect_role(projector, "mmproj", "with --mmproj")
        _check_width(language, projector)
    if mtp is None:
        return GgufModel(language, projector, None, language.metadata, language.tensors)
    draft = open_source(mtp)
    _expect_role(draft, "mtp", "with --mtp")
    return _with_mtp(language, projector, draft)


_INSTEAD = {
    "mmproj": "a vision projector (mmproj); give the language model as the model and this file with --mmproj",
    "mtp": "a separate MTP file without the model's trunk; give the full model and this file with --mtp",
    "model": "a language model; give it as the model",
    "vocabulary": "a vocabulary without weights; give the full model",
    "adapter": "a LoRA adapter; merge it into its base model with llama-export-lora first",
    "imatrix": "an importance matrix, which holds no weights; give the model",
}


def _expect_role(source: GgufSource, wanted: str, where: str) -> None:
    role = source.role
    if role == wanted:
        return
    message = f"{source.path} was given {where}, but it is {_INSTEAD[role]}."
    if role in ("adapter", "vocabulary"):
        raise UnsupportedError(message)
    raise UsageError(message)


def _check_width(language: GgufSource, projector: GgufSource) -> None:
    width = language.metadata.get(f"{language.architecture}.embedding_length")
    projected = projector.metadata.get("clip.vision.projection_dim")
    if projected is not None and width is not None and projected != width:
        raise UsageError(
            f"{projector.path} projects to {projected} channels but {language.path} is {width} wide; "
            "the mmproj belongs to another model, take the one published beside this model."
        )


_COPY = "the MTP file's copy of a tensor of the model"


def _with_mtp(language: GgufSource, projector: GgufSource | None, draft: GgufSource) -> GgufModel:
    architecture = language.architecture
    if draft.architecture != architecture:
        raise UsageError(
            f"{draft.path} is of architecture {draft.architecture} but {language.path} is {architecture}; "
            "take the MTP file published beside this model."
        )
    # A publisher may have taken the blocks out and left the key.
    if language.mtp_depth and any(".nextn." in name for name in language.tensors):
        raise UsageError(
            f"{language.path} holds its MTP blocks already; leave --mtp {draft.path} out."
        )
    trunk = language.whole_number(f"{architecture}.block_count") - language.mtp_depth
    depth = draft.mtp_depth
    blocks = draft.whole_number(f"{architecture}.block_count")
    if blocks - depth != trunk:
        raise UsageError(
            f"{draft.path} continues a model of {blocks - depth} blocks but {language.path} has {trunk}; "
            "take the MTP file published beside this model."
        )
    widths = [s.whole_number(f"{architecture}.embedding_length") for s in (draft, language)]
    if widths[0] != widths[1]:
        raise UsageError(
            f"{draft.path} is {widths[0]} channels wide but {language.path} is {widths[1]} wide; "
            "take the MTP file published beside this model."
        )
    for name in sorted(draft.tensors.keys() & language.tensors.keys()):
        if draft.tensors[name].shape != language.tensors[name].shape:
            raise UsageError(
                f"tensor {name} has shape {draft.tensors[name].shape} in {draft.path} and "
                f"{language.tensors[name].shape} in {language.path}; the files are of different models."
            )
    replaced = {
        f"{architecture}.block_count": blocks,
        f"{architecture}.nextn_predict_layers": depth,
    }
    recurrent = f"{architecture}.attention.recurrent_layers"
    if recurrent in draft.metadata:
        replaced[recurrent] = draft.metadata[recurrent]
    return GgufModel(
        language,
        projector,
        draft,
        _Overlay(language.metadata, replaced),
        draft.tensors | language.tensors,
        tuple((t, _COPY) for name, t in draft.tensors.items() if name in language.tensors),
    )
