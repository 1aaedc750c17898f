"""Recipes x target x engines -> Plan: everything that will exist, as pure data.

A dry run prints it, the conversion runs it, progress and reports count it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf2st import gpu
from gguf2st.alternatives import working_choice
from gguf2st.checkpoint.documents import Documents, build_documents
from gguf2st.checkpoint.writer import Placement, Shard, index_document, lay_out
from gguf2st.errors import Gguf2stError, InputError, UnsupportedError, UsageError
from gguf2st.folding import Folding
from gguf2st.gguf import GgufModel
from gguf2st.mapping import Recipe, Resolution, resolve
from gguf2st.modules import Module
from gguf2st.options import PlanOptions
from gguf2st.selection import Kept, Selection, as_read
from gguf2st.smoothing import scaled_by_importance
from gguf2st.targets import Quantized, Target, TensorSpec, target_named
from gguf2st.targets.lossless import on_grid

# Elements that one worker decodes at a time: 4 MB of float32, near a core's cache.
CHUNK_ELEMENTS = 1 << 20
# The same where float32 values never are: 8 MB of output at a time.
DIRECT_ELEMENTS = 1 << 22
# Measured: the interpreter with its libraries, and one worker's buffers, in bytes.
BASE_MEMORY = 120_000_000
CHUNK_MEMORY = 32 * CHUNK_ELEMENTS
# Plans differ in headers and config.json, too, by fewer bytes.
SLACK = 4096
# Share of a budget that a plan should use.
NEARLY_ALL = 0.97


@dataclass(frozen=True)
class PlannedTensor:
    """An unquantized tensor: the recipe it comes from and its place in a shard."""

    recipe: Recipe
    placement: Placement


@dataclass(frozen=True)
class PlannedModule:
    """A quantized matrix: its scheme, and the places of the tensors that stand for it."""

    module: Module
    quantized: Quantized
    placements: dict[str, Placement]


@dataclass(frozen=True)
class Plan:
    """Every tensor and file of the output.

    `tensors` are unquantized, `modules` quantized; `documents` maps file names to
    their text; `kept` says which matrices a rule left unquantized; `peak_memory` is
    an estimate in bytes; `engines` load the result.
    """

    resolution: Resolution
    target: Target
    options: PlanOptions
    tensors: tuple[PlannedTensor, ...]
    modules: tuple[PlannedModule, ...]
    kept: tuple[Kept, ...]
    shards: tuple[Shard, ...]
    documents: dict[str, str]
    folding: Folding
    warnings: tuple[str, ...]
    differences: tuple[str, ...]
    engines: tuple[str, ...]

    @property
    def placements(self) -> Iterator[Placement]:
        """Places of all tensors."""
        for tensor in self.tensors:
            yield tensor.placement
        for module in self.modules:
            yield from module.placements.values()

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
    def parameters(self) -> int:
        """Weights of the model."""
        return sum(math.prod(recipe.shape) for recipe in self.resolution.recipes)

    @property
    def bits_per_weight(self) -> float:
        """Bytes of the whole output for each weight of the model, in bits."""
        return 8 * self.total_bytes / max(1, self.parameters)

    @property
    def peak_memory(self) -> int:
        """Estimated peak of resident memory in bytes; it doesn't grow with the model."""
        vocabulary = sum(len(text) for text in self.documents.values())
        # A stack is written as it comes; other encoders may hold a matrix until it is complete.
        matrices = (module for module in self.modules if not module.quantized.experts)
        packed = max(
            (sum(p.nbytes for p in module.placements.values()) for module in matrices), default=0
        )
        if self.options.device != "cpu":
            base, worker = gpu.BASE_MEMORY, gpu.WORKER_MEMORY
        else:
            base, worker = BASE_MEMORY, CHUNK_MEMORY + 2 * packed
        return base + self.options.threads * worker + 3 * vocabulary

    @property
    def imatrix_helps(self) -> bool:
        """Whether 4 bits are searched that lose something, and without an importance matrix."""
        searched = self.options.fit == "search" and not self.target.by_type
        if not searched or self.options.importance is not None:
            return False
        found = ((planned.module, planned.quantized.scheme) for planned in self.modules)
        return any(
            scheme.kind == "int"
            and scheme.bits == 4
            and scheme.activation_bits == 16
            and not on_grid(module.block_types(), scheme)
            for module, scheme in found
        )

    def components(self) -> dict[str, int]:
        """Component ("text", "vision", "mtp") -> number of source-level tensors of the output."""
        recipes = [tensor.recipe for tensor in self.tensors]
        recipes += {
            module.module.recipe.name: module.module.recipe for module in self.modules
        }.values()
        return dict(Counter(recipe.component for recipe in recipes))

    def schemes(self) -> dict[str, int]:
        """Scheme -> number of modules that are quantized so."""
        return dict(Counter(str(module.quantized.scheme) for module in self.modules))

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
            "tensors": [self._tensor_entry(t.placement, t.recipe) for t in self.tensors],
            "modules": [
                {
                    "name": module.module.name,
                    "scheme": str(module.quantized.scheme),
                    "source": module.module.source().tensor.kind.name,
                    "tensors": [
                        self._tensor_entry(p, module.module.recipe)
                        for p in module.placements.values()
                    ],
                }
                for module in self.modules
            ],
            "kept": [[kept.name, kept.reason] for kept in self.kept],
            "dropped": [[d.tensor.name, d.reason] for d in self.resolution.dropped],
            "warnings": list(self.warnings),
            "differences": list(self.differences),
        }

    def _tensor_entry(self, placement: Placement, recipe: Recipe) -> dict[str, Any]:
        return {
            "name": placement.spec.name,
            "dtype": placement.spec.dtype,
            "shape": list(placement.spec.shape),
            "file": self.shards[placement.shard].file_name,
            "component": recipe.component,
            "sources": [[s.tensor.name, s.tensor.kind.name] for s in recipe.sources],
            "operations": list(recipe.operations),
        }


def make_plan(model: GgufModel, options: PlanOptions) -> Plan:
    """Decide everything about a conversion; nothing is written and no weight is read.

    Raises the errors of `resolve` and of the checkpoint's files, `UsageError` for
    options that contradict each other, and `InputError` when keys hold values of a
    kind that nobody can make sense of.
    """
    target = target_named(options.to, options.target)
    with _keys_making_sense(model.language.path):
        resolution = resolve(model, options.mapping_directory)
    target = as_read(target, options, resolution)
    try:
        chosen = Selection(resolution, target, options)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}; take {working_choice(resolution, options)}, or narrow --engine."
        ) from error
    drafts = _Drafts(resolution, target, options, chosen)
    plan = drafts.draft() if options.bits_per_weight is None else drafts.within_budget()
    plan = replace(
        plan,
        folding=scaled_by_importance(resolution, target, options, chosen.modules),
        warnings=(*plan.warnings, *chosen.check(drafts.quantization())),
    )
    return _within_memory(plan)


def _within_memory(plan: Plan) -> Plan:
    """The plan with as many workers as the memory allows. Raises `UsageError` if one is too many."""
    limit = plan.options.max_memory
    if limit is None:
        return plan
    for threads in range(plan.options.threads, 0, -1):
        plan = replace(plan, options=replace(plan.options, threads=threads))
        if plan.peak_memory <= limit:
            return plan
    needed = math.ceil(plan.peak_memory / 1e6)
    raise UsageError(
        f"--max-memory is {limit / 1e6:.0f} MB, and one worker with the interpreter needs about "
        f"{needed} MB; give --max-memory {needed}MB or more."
    )


class _Drafts:
    """Plans of a model that differ in what a selection has decided; nothing is folded yet."""

    def __init__(
        self, resolution: Resolution, target: Target, options: PlanOptions, chosen: Selection
    ) -> None:
        self._resolution, self._target, self._options = resolution, target, options
        self._chosen = chosen

    @functools.cached_property
    def _documents(self) -> Documents:
        with _keys_making_sense(self._resolution.model.language.path):
            return build_documents(
                self._resolution,
                self._target,
                tokenizer_from=self._options.tokenizer_from,
                config_from=self._options.config_from,
            )

    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of what is decided."""
        return self._target.quantization_config(
            [quantized for _, quantized in self._chosen.modules], self._chosen.unquantized_names()
        )

    def within_budget(self) -> Plan:
        """The last plan on the way to the most exact one that has at most the bits asked for.

        Raises `UnsupportedError` when even the smallest has more.
        """
        smallest = self.draft()
        wanted = self._options.bits_per_weight or 0.0
        spare = math.ceil(wanted * smallest.parameters / 8) - smallest.total_bytes
        grown = list(itertools.accumulate(step.growth for step in self._chosen.steps))
        count, plan = bisect.bisect_right(grown, spare + SLACK), smallest
        while count:
            self._chosen.climb(count)
            plan = self.draft()
            if plan.bits_per_weight <= wanted:
                break
            count -= 1
        if not count:
            self._chosen.climb(0)
            plan = smallest
        if plan.bits_per_weight > wanted:
            least = math.ceil(smallest.bits_per_weight * 100) / 100
            raise UnsupportedError(
                f"the smallest {self._target.name} checkpoint of {self._resolution.model.language.path} "
                f"has {smallest.bits_per_weight:.3f} bits per weight, its unquantized parts included; "
                f"give --bits-per-weight {least:.2f} or more."
            )
        if count < len(grown) and plan.bits_per_weight < NEARLY_ALL * wanted:
            larger = plan.total_bytes + self._chosen.steps[count].growth
            unused = (
                f"{plan.bits_per_weight:.2f} of {wanted:g} bits per weight are used: the next larger plan "
                f"has {8 * larger / plan.parameters:.2f}, as an engine joins what its step makes finer"
            )
            return replace(plan, warnings=(*plan.warnings, unused))
        return plan

    def draft(self) -> Plan:
        """The plan of what is decided."""
        resolution, target, chosen = self._resolution, self._target, self._chosen
        path = resolution.model.language.path
        specs: list[TensorSpec] = []
        dense: dict[str, Recipe] = {}
        for recipe in resolution.recipes:
            modules = chosen.quantized_modules(recipe)
            if modules:
                for _, quantized in modules:
                    specs += target.tensors(quantized)
            else:
                dtype = "F32" if recipe.dtype == "f32" else target.dtype
                specs.append(TensorSpec(recipe.name, dtype, recipe.shape))
                dense[recipe.name] = recipe
        if not specs:
            raise InputError(f"{path} holds no weights; give a model.")
        if target.schemes() and not chosen.modules:
            reasons = sorted({kept.reason for kept in chosen.kept})
            raise UnsupportedError(
                f"no matrix of {path} can be quantized as {target.name}: {'; '.join(reasons)}; "
                f"take {working_choice(resolution, self._options)}."
            )
        placements, shards = lay_out(specs, self._options.max_shard_bytes)
        places = {placement.spec.name: placement for placement in placements}
        documents = self._documents
        texts = documents.with_quantization(self.quantization())
        index = index_document(placements, shards)
        if index is not None:
            texts["model.safetensors.index.json"] = documents.as_json(index)
        return Plan(
            resolution=resolution,
            target=target,
            options=self._options,
            tensors=tuple(PlannedTensor(recipe, places[name]) for name, recipe in dense.items()),
            modules=tuple(
                PlannedModule(
                    module, quantized, {s.name: places[s.name] for s in target.tensors(quantized)}
                )
                for module, quantized in chosen.modules
            ),
            kept=tuple(chosen.kept),
            shards=shards,
            documents=texts,
            folding=Folding(),
            warnings=(*documents.warnings, *chosen.warnings),
            differences=tuple(documents.differences),
            engines=self._chosen.engines,
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
