"""Recipes x target -> Plan: everything that will exist, as pure data.

A dry run prints it, the conversion runs it, progress and reports count it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf2st.checkpoint.documents import build_documents
from gguf2st.checkpoint.writer import Placement, Shard, index_document, lay_out
from gguf2st.errors import Gguf2stError, InputError
from gguf2st.gguf import GgufModel
from gguf2st.mapping import Recipe, Resolution, resolve
from gguf2st.targets import Target, target_named

DEFAULT_SHARD_BYTES = 5_000_000_000
# Elements that one worker decodes at a time: 4 MB of float32, near a core's cache.
CHUNK_ELEMENTS = 1 << 20
# Measured: the interpreter with its libraries, and one worker's buffers, in bytes.
BASE_MEMORY = 120_000_000
CHUNK_MEMORY = 32 * CHUNK_ELEMENTS


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the output: the recipe it comes from and its place in a shard."""

    recipe: Recipe
    placement: Placement


@dataclass(frozen=True)
class Plan:
    """Every tensor and file of the output.

    `documents` maps file names to their text; `peak_memory` is an estimate in bytes.
    """

    resolution: Resolution
    target: Target
    tensors: tuple[PlannedTensor, ...]
    shards: tuple[Shard, ...]
    documents: dict[str, str]
    warnings: tuple[str, ...]
    differences: tuple[str, ...]
    threads: int

    @property
    def model_class(self) -> str:
        """`architectures[0]` of the output."""
        classes = self.resolution.table.classes[self.resolution.variant]
        return classes["class"].fill(self.resolution.text)

    @property
    def total_bytes(self) -> int:
        """Size of the whole output in bytes."""
        return sum(shard.nbytes for shard in self.shards) + sum(
            len(text.encode()) for text in self.documents.values()
        )

    @property
    def peak_memory(self) -> int:
        """Estimated peak of resident memory in bytes; it doesn't grow with the model."""
        vocabulary = sum(len(text) for text in self.documents.values())
        return BASE_MEMORY + self.threads * CHUNK_MEMORY + 3 * vocabulary

    def components(self) -> dict[str, int]:
        """Component ("text", "vision", "mtp") -> number of output tensors."""
        return dict(Counter(tensor.recipe.component for tensor in self.tensors))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return {
            "architecture": self.resolution.model.architecture,
            "table": self.resolution.table.name,
            "class": self.model_class,
            "target": self.target.name,
            "total_bytes": self.total_bytes,
            "peak_memory": self.peak_memory,
            "components": self.components(),
            "files": {s.file_name: s.nbytes for s in self.shards}
            | {name: len(text.encode()) for name, text in self.documents.items()},
            "tensors": [
                {
                    "name": t.placement.spec.name,
                    "dtype": t.placement.spec.dtype,
                    "shape": list(t.placement.spec.shape),
                    "file": self.shards[t.placement.shard].file_name,
                    "component": t.recipe.component,
                    "sources": [[s.tensor.name, s.tensor.kind.name] for s in t.recipe.sources],
                    "operations": list(t.recipe.operations),
                }
                for t in self.tensors
            ],
            "dropped": [[d.tensor.name, d.reason] for d in self.resolution.dropped],
            "warnings": list(self.warnings),
            "differences": list(self.differences),
        }


def make_plan(
    model: GgufModel,
    *,
    to: str,
    maximum_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer_from: Path | None = None,
    config_from: Path | None = None,
    mapping_directory: Path | None = None,
    threads: int = 1,
) -> Plan:
    """Decide everything about a conversion; nothing is written and no weight is read.

    Raises the errors of `resolve` and of the checkpoint's files, and `InputError`
    when keys hold values of a kind that nobody can make sense of.
    """
    target = target_named(to)
    with _keys_making_sense(model.language.path):
        resolution = resolve(model, mapping_directory)
        documents = build_documents(
            resolution, target, tokenizer_from=tokenizer_from, config_from=config_from
        )
    owners = {
        spec.name: (recipe, spec)
        for recipe in resolution.recipes
        for spec in target.tensors(recipe)
    }
    if not owners:
        raise InputError(f"{model.language.path} holds no weights; give a model.")
    placements, shards = lay_out([spec for _, spec in owners.values()], maximum_shard_bytes)
    texts = dict(documents.texts)
    index = index_document(placements, shards)
    if index is not None:
        texts["model.safetensors.index.json"] = documents.as_json(index)
    return Plan(
        resolution=resolution,
        target=target,
        tensors=tuple(PlannedTensor(owners[p.spec.name][0], p) for p in placements),
        shards=shards,
        documents=texts,
        warnings=tuple(documents.warnings),
        differences=tuple(documents.differences),
        threads=threads,
    )


@contextlib.contextmanager
def _keys_making_sense(path: Path) -> Iterator[None]:
    """Turn what values of the wrong kind cause into one sentence about the file.

    A key may hold a text where a number belongs, or infinity: hostile, but not worth a
    check at each of a hundred uses.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        if isinstance(error, Gguf2stError):
            raise
        reason = " ".join(str(error).encode("utf-8", "backslashreplace").decode().split())[:120]
        raise InputError(
            f"{path} has a key whose value is of the wrong kind ({reason}); "
            "it was made by a faulty converter, convert the original again."
        ) from error
