"""Table x model -> recipes: one for every tensor that will exist.

Nothing vanishes: every source tensor is mapped, dropped by an entry that says
why, or fatal; every tensor that the table expects of this model is produced, or
fatal.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf2st.errors import InputError, UnsupportedError
from gguf2st.gguf.container import TensorInfo
from gguf2st.gguf.model import GgufModel, GgufSource
from gguf2st.mapping.environment import Environment
from gguf2st.mapping.expression import ExpressionError
from gguf2st.mapping.folds import Fold, folds_of
from gguf2st.mapping.loading import TableError, load_tables, table_serving
from gguf2st.mapping.recipe import Building, Recipe, views_of
from gguf2st.mapping.table import Entry, Group, Table
from gguf2st.mapping.view import Source, View


@dataclass(frozen=True)
class Dropped:
    """A source tensor that is left out on purpose."""

    tensor: TensorInfo
    reason: str


@dataclass(frozen=True)
class Resolution:
    """All recipes of a model, with what the configuration needs to know.

    `vision` and `vision_table` are None without a projector.
    """

    model: GgufModel
    variant: str
    table: Table
    text: Environment
    vision_table: Table | None
    vision: Environment | None
    recipes: tuple[Recipe, ...]
    dropped: tuple[Dropped, ...]
    folds: tuple[Fold, ...]


def find_table(architecture: str, path: Path, directory: Path | None = None) -> Table:
    """The table that serves an architecture. Raises `UnsupportedError` with the nearest names."""
    table = table_serving("architectures", architecture, directory)
    if table is not None:
        return table
    known = sorted(name for table in load_tables(directory) for name in table.architectures)
    raise UnsupportedError(
        f"{path} is of architecture {architecture!r}, which no mapping table serves yet"
        f"{_nearest(architecture, known)}; `gguf2st archs` lists all, and CONTRIBUTING.md shows how "
        "one is added."
    )


def _find_projector_table(text: Table, projector: GgufSource, directory: Path | None) -> Table:
    kind = projector.metadata.get("clip.projector_type") or projector.metadata.get(
        "clip.vision.projector_type"
    )
    if kind not in text.accepts_projectors:
        known = sorted({name for table in load_tables(directory) for name in table.projectors})
        raise UnsupportedError(
            f"{projector.path} has a projector of type {kind!r}, and {text.family} models are converted "
            f"with {' or '.join(text.accepts_projectors) or 'none'} (known: {', '.join(known)}); "
            "take the mmproj published beside this model."
        )
    table = table_serving("projectors", kind, directory)
    if table is None:
        raise TableError(text.name, [f"no table serves the projector {kind!r} that it accepts"])
    return table


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 3, 0.5)
    return f" (nearest: {', '.join(close)})" if close else ""


def resolve(model: GgufModel, directory: Path | None = None) -> Resolution:
    """Find the tables of a model and turn its tensors into recipes.

    Raises `UnsupportedError` for an unknown architecture, projector or tensor,
    and `InputError` when something that the model needs isn't there.
    """
    table = find_table(model.architecture, model.language.path, directory)
    variant = "multimodal" if model.projector else "text"
    vision_table = None
    if model.projector is not None:
        vision_table = _find_projector_table(table, model.projector, directory)
    if variant not in table.classes:
        raise UnsupportedError(
            f"{table.family} models have no {variant} class in {table.name}.toml."
        )
    text = Environment(table, model, table.classes[variant]["prefix"].fill({}))
    resolver = _Resolver(table, text, model.tensors, model.language.path)
    recipes, dropped = resolver.run()
    dropped += [Dropped(tensor, reason) for tensor, reason in model.left_out]
    vision = None
    if vision_table is not None and model.projector is not None:
        vision = Environment(vision_table, model, "")
        vision["P"] = table.classes["multimodal"]["vision_prefix"].fill(text)
        vision["projector_prefix"] = table.classes["multimodal"]["projector_prefix"].fill(text)
        more, more_dropped = _Resolver(
            vision_table, vision, model.projector.tensors, model.projector.path
        ).run()
        recipes, dropped = recipes + more, dropped + more_dropped
    return Resolution(
        model,
        variant,
        table,
        text,
        vision_table,
        vision,
        tuple(recipes),
        tuple(dropped),
        tuple(resolver.folds()),
    )


@dataclass(frozen=True, eq=False)
class _Match:
    group: Group
    entry: Entry
    names: dict[str, Any]


class _Resolver:
    """Matches the tensors of one file set against one table."""

    def __init__(
        self, table: Table, environment: Environment, tensors: dict[str, TensorInfo], path: Path
    ) -> None:
        self._table, self._names = table, environment
        self._tensors, self._path = tensors, path
        self._recipes: dict[str, Recipe] = {}
        self._dropped: list[Dropped] = []

    def run(self) -> tuple[list[Recipe], list[Dropped]]:
        scales = set(self._scale_companions())
        parts: dict[Any, dict[int, Source]] = defaultdict(dict)
        matches: dict[Any, _Match] = {}
        for tensor in self._tensors.values():
            if tensor.name in scales:
                continue
            found = self._match(tensor.name)
            if found is None:
                self._refuse(tensor)
                continue
            position, match = found
            if match.entry.drop is not None:
                self._dropped.append(Dropped(tensor, match.entry.drop))
                continue
            key = (id(match.entry), tuple(sorted(match.names.items())))
            matches[key] = match
            companion = self._tensors.get(_companion(tensor.name, "scale"))
            scale = companion if companion is not None and companion.name in scales else None
            parts[key][position] = Source(tensor, scale)
        for key, match in matches.items():
            self._combine(match, parts[key])
        self._expect_complete()
        return list(self._recipes.values()), self._dropped

    def folds(self) -> Iterator[Fold]:
        """Where scales of activations may move, block by block."""
        # Not more than the tensors can hold, whatever a damaged key claims.
        most = max([len(self._tensors), *(t.shape[0] for t in self._tensors.values())])
        experts = min(self._names.get("experts", 0), most)
        for layer in range(self._names.get("blocks", 0)):
            names = self._with_block({"layer": layer})
            if names is not None and "B" in names:
                yield from folds_of(self._table.folds, names, experts)

    def _scale_companions(self) -> Iterator[str]:
        """NVFP4 keeps the second-level scales of X.weight in X.scale and X.input_scale."""
        for tensor in self._tensors.values():
            if tensor.kind.name != "NVFP4":
                continue
            if (scale := _companion(tensor.name, "scale")) in self._tensors:
                yield scale
            if (activation := _companion(tensor.name, "input_scale")) in self._tensors:
                self._dropped.append(
                    Dropped(
                        self._tensors[activation], "an activation scale, not part of the weight"
                    )
                )
                yield activation

    def _match(self, name: str) -> tuple[int, _Match] | None:
        for group in self._table.groups:
            for entry in group.entries:
                for position, pattern in enumerate(entry.parts):
                    captured = pattern.match(name)
                    if captured is None:
                        continue
                    names = self._with_block(captured)
                    if names is not None and self._holds(group, entry, names):
                        return position, _Match(group, entry, captured)
        return None

    def _with_block(self, captured: dict[str, Any]) -> dict[str, Any] | None:
        """All names for an entry, {B} included; None when no block of the table fits."""
        names = {**self._names, **captured}
        if "layer" not in captured or not self._table.blocks:
            return names
        for block in self._table.blocks:
            if self._evaluate(block.when, names):
                names["B"] = block.prefix.fill(names)
                names["block_component"] = block.component
                return names
        return None

    def _holds(self, group: Group, entry: Entry, names: dict[str, Any]) -> bool:
        conditions = (condition for condition in (group.when, entry.when) if condition is not None)
        return all(self._evaluate(condition, names) for condition in conditions)

    def _evaluate(self, expression: Any, names: dict[str, Any]) -> Any:
        try:
            return expression.evaluate(names)
        except ExpressionError as error:
            raise InputError(
                f"{self._path} and {self._table.name}.toml don't agree: {error}."
            ) from error

    def _refuse(self, tensor: TensorInfo) -> None:
        known = [
            pattern.source for g in self._table.groups for e in g.entries for pattern in e.parts
        ]
        raise UnsupportedError(
            f"{self._path}: tensor {tensor.name} {tensor.shape} ({tensor.kind.name}) is in no entry of "
            f"{self._table.name}.toml{_nearest(tensor.name, known)}, and leaving it out would change "
            "the model; add an entry (CONTRIBUTING.md shows how) or report the file."
        )

    def _combine(self, match: _Match, parts: dict[int, Source]) -> None:
        entry, names = match.entry, self._with_block(match.names)
        assert names is not None
        if len(parts) < len(entry.parts):
            there = next(iter(parts.values())).tensor.name
            missing = [p.fill(match.names) for i, p in enumerate(entry.parts) if i not in parts]
            raise InputError(
                f"{self._path} has tensor {there} but not {', '.join(missing)}, which belongs with it; "
                "the file is incomplete, convert it again."
            )
        sources = tuple(parts[position] for position in range(len(entry.parts)))
        building = Building(self._path, entry, names, sources)
        made = views_of(building)
        for position, (name, view) in enumerate(
            zip(self._outputs(entry, names, made), made, strict=True)
        ):
            if name in self._recipes:
                raise InputError(
                    f"{self._path}: both {sources[0].tensor.name} and "
                    f"{self._recipes[name].sources[0].tensor.name} give {name}; the file holds a tensor twice."
                )
            component = (
                names.get("block_component") or match.group.component or self._table.component
            )
            self._recipes[name] = Recipe(
                name=name,
                shape=view.shape,
                sources=sources,
                component=component,
                dtype=entry.dtype,
                unquantized=self._unquantized(name, view.shape, component),
                fused=self._fused(name, {"expert": position} | names),
                priority=self._priority(name, names),
                experts=self._experts(name, names),
                operations=tuple(call.source for call in entry.by),
                building=building,
                position=position,
            )

    def _outputs(self, entry: Entry, names: dict[str, Any], views: list[View]) -> list[str]:
        each = "expert" not in names and all("expert" in name.names for name in entry.to)
        if each and entry.to and len(views) % len(entry.to) == 0:
            experts = range(len(views) // len(entry.to))
            return [name.fill({**names, "expert": e}) for name in entry.to for e in experts]
        if len(entry.to) != len(views):
            raise InputError(
                f"{self._table.name}.toml: {entry.parts[0].source} makes {len(views)} tensors "
                f"but names {len(entry.to)}."
            )
        return [template.fill(names) for template in entry.to]

    def _unquantized(self, name: str, shape: tuple[int, ...], component: str) -> str | None:
        for pattern, reason in self._table.unquantized.items():
            if fnmatch.fnmatchcase(name, pattern):
                return reason
        if len(shape) < 2 or name.endswith("bias"):
            return "not a matrix"
        return None if component == "text" else f"part of the {component} component"

    def _fused(self, name: str, names: dict[str, Any]) -> str | None:
        module = name.removesuffix(".weight")
        for kind, members in self._table.fused.items():
            for member in members:
                if member.names <= names.keys() and member.fill(names) == module:
                    return f"{names.get('B', '')}:{kind}"
        return None

    def _priority(self, name: str, names: dict[str, Any]) -> int | None:
        module = name.removesuffix(".weight")
        for place, members in enumerate(self._table.finer.values()):
            for member in members:
                if member.names <= names.keys() and member.fill(names) == module:
                    return place
        return None

    def _experts(self, name: str, names: dict[str, Any]) -> tuple[str, ...]:
        for stacked, modules in self._table.experts.items():
            if stacked.names <= names.keys() and stacked.fill(names) == name:
                return tuple(module.fill(names | {"expert": "{expert}"}) for module in modules)
        return ()

    def _expect_complete(self) -> None:
        for group in self._table.groups:
            if group.optional:
                continue
            for entry in group.entries:
                for captured in self._occurrences(entry):
                    names = self._with_block(captured)
                    if (
                        entry.drop is None
                        and names is not None
                        and self._holds(group, entry, names)
                    ):
                        self._expect(entry, names, captured)

    def _expect(self, entry: Entry, names: dict[str, Any], captured: dict[str, Any]) -> None:
        for template in entry.to:
            experts = range(self._names.get("experts", 0))
            many = "expert" in template.names and "expert" not in names
            # One after the other: a damaged file may claim billions of experts.
            outputs = (
                (template.fill({**names, "expert": e}) for e in experts)
                if many
                else iter([template.fill(names)])
            )
            for output in outputs:
                if output not in self._recipes:
                    raise InputError(
                        f"{self._path} lacks tensor {entry.parts[0].fill(captured)}, without which the "
                        f"model's {output} would be missing; the file is incomplete, fetch or convert it again."
                    )

    def _occurrences(self, entry: Entry) -> Iterator[dict[str, Any]]:
        placeholders = entry.parts[0].placeholders
        layers = range(self._names.get("blocks", 0)) if "layer" in placeholders else (None,)
        experts = range(self._names.get("experts", 0)) if "expert" in placeholders else (None,)
        for layer in layers:
            for expert in experts:
                found = {"layer": layer, "expert": expert, "kind": "weight"}
                yield {key: value for key, value in found.items() if key in placeholders}


def _companion(name: str, leaf: str) -> str:
    return name.removesuffix("weight") + leaf
