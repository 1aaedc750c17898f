"""Reading and validating mapping tables.

A table is TOML, one per architecture family; docs/mapping-tables.md is its manual.
Loading reports all that is wrong with a table at once.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf2st.errors import UsageError
from gguf2st.mapping.calls import OperationCall
from gguf2st.mapping.expression import Expression, ExpressionError, Template
from gguf2st.mapping.folds import FoldRule
from gguf2st.mapping.table import Block, Entry, Fields, Formats, Group, Pattern, Table

Stamps = tuple[tuple[str, int, int], ...]

SCHEMA = 1
ENTRY_KEYS = {"to", "by", "dtype", "when", "drop"}
GROUP_KEYS = {"when", "optional", "component"}
_FIELDS = {"derived": dict, "constants": dict}
_CLASS = {
    "class": str,
    "model_type": str,
    "text_model_type": str,
    "vision_model_type": str,
    "prefix": str,
    "vision_prefix": str,
    "projector_prefix": str,
    "projectors": [str],
}
# What may stand where; * is any other key.
_STRUCTURE: dict[str, Any] = {
    "schema": int,
    "family": str,
    "extends": str,
    "architectures": [str],
    "projectors": [str],
    "differences": str,
    "component": str,
    "variables": dict,
    "checks": dict,
    "classes": {"text": _CLASS, "multimodal": _CLASS},
    "blocks": [{"when": str, "prefix": str, "component": str}],
    "tensors": {"*": {"when": str, "optional": bool, "component": str, "*": object}},
    "experts": {"*": object},
    "quantized": {"variants": {"*": str}, "others": str},
    "fused": {"*": [str]},
    "finer": {"*": [str]},
    "unquantized": {"*": str},
    "fold": {"*": {"from": str, "into": [str], "added": int, "heads": str}},
    "config": _FIELDS,
    "multimodal": _FIELDS,
    "files": {"*": _FIELDS},
    "tokenizer": dict,
}
_KINDS = {str: "a text", int: "a number", bool: "true or false", dict: "a section"}
DTYPES = ("f32",)


class TableError(UsageError):
    """A mapping table isn't valid; `problems` lists everything that is wrong."""

    def __init__(self, name: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(
            f"the mapping table {name} has {len(problems)} problem(s): {'; '.join(problems)}."
        )


def mappings_directory() -> Path:
    """Where the tables lie: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "mappings"
    return inside if inside.is_dir() else package.parent / "mappings"


def load_tables(directory: Path | None = None) -> tuple[Table, ...]:
    """All tables that serve an architecture or a projector.

    Raises `TableError` for the first invalid table, `UsageError` when there is no such directory.
    """
    directory = directory or mappings_directory()
    return _load_tables(directory, _stamps(directory))


def table_serving(kind: str, name: str, directory: Path | None = None) -> Table | None:
    """The table that lists `name` among its "architectures" or "projectors" (`kind`), or None.

    The others aren't loaded. Raises as `load_tables` does.
    """
    directory = directory or mappings_directory()
    return _table_serving(kind, name, directory, _stamps(directory))


@functools.lru_cache(maxsize=64)
def _table_serving(kind: str, name: str, directory: Path, _stamps: Stamps) -> Table | None:
    for path in _paths(directory):
        served = _read(path, []).get(kind)
        if isinstance(served, list) and name in served:
            return load_table(path)
    return None


def _paths(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UsageError(
            f"{directory} isn't a directory of mapping tables; give one with --mappings."
        )
    return sorted(directory.glob("*.toml"))


def _stamps(directory: Path) -> Stamps:
    """Each table's name, time and size: what was loaded counts until one of them differs."""
    found = [(path.name, path.stat()) for path in _paths(directory)]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in found)


@functools.lru_cache(maxsize=4)
def _load_tables(directory: Path, _stamps: Stamps) -> tuple[Table, ...]:
    tables = [load_table(path) for path in _paths(directory)]
    return tuple(table for table in tables if table.architectures or table.projectors)


def load_table(path: Path) -> Table:
    """One table with everything it extends. Raises `TableError` with all its problems."""
    problems: list[str] = []
    try:
        table = _Builder(path.stem, _merged(path, problems, ()), problems).table()
    except RecursionError as error:
        raise TableError(path.name, [*problems, "it is nested too deeply"]) from error
    if problems:
        raise TableError(path.name, problems)
    return table


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(f"{path.name} can't be read ({reason})")
        return {}


def _merged(path: Path, problems: list[str], seen: tuple[str, ...]) -> dict[str, Any]:
    data = _read(path, problems)
    parent = data.get("extends")
    if parent is None:
        return data
    # A plain file name only: a table can't reach other files.
    if not isinstance(parent, str) or not re.fullmatch(r"[\w.-]+", parent) or path.stem in seen:
        problems.append(f"extends = {parent!r} isn't the name of another table")
        return data
    base = _merged(path.with_name(parent + ".toml"), problems, (*seen, path.stem))
    for private in ("architectures", "projectors", "family"):
        base.pop(private, None)
    return _overlay(base, data)


def _overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in top.items():
        below = result.get(key)
        if value is False and isinstance(below, dict | str | list) and key != "optional":
            del result[key]  # a child takes an inherited line or section away
            continue
        # An entry or a list is replaced as a whole; sections are merged line by line.
        if (
            isinstance(value, dict)
            and isinstance(below, dict)
            and not value.keys() & {"to", "drop"}
        ):
            result[key] = _overlay(below, value)
        else:
            result[key] = value
    return result


class _Builder:
    """Turns a parsed table into a `Table`, collecting problems on the way."""

    def __init__(self, name: str, data: dict[str, Any], problems: list[str]) -> None:
        self._name, self._problems = name, problems
        self._data: dict[str, Any] = self._sound("", data, _STRUCTURE)

    def _sound(self, where: str, value: Any, structure: Any) -> Any:
        """The parts of `value` that are what may stand there; the rest become problems."""
        if isinstance(structure, type):
            return value if isinstance(value, structure) else self._misplaced(where, structure)
        if isinstance(structure, list):
            if not isinstance(value, list):
                return self._misplaced(where, list)
            items = (self._sound(f"{where}[{n}]", v, structure[0]) for n, v in enumerate(value))
            return [item for item in items if item is not None]
        if not isinstance(value, dict):
            return self._misplaced(where, dict)
        result = {}
        for key, part in value.items():
            inner = structure.get(key, structure.get("*"))
            place = f"{where}.{key}" if where else key
            if inner is None:
                self._problems.append(f"the key {place!r} isn't known")
            elif (sound := self._sound(place, part, inner)) is not None:
                result[key] = sound
        return result

    def _misplaced(self, where: str, kind: type) -> None:
        self._problems.append(f"{where!r} must be {_KINDS.get(kind, 'a list')}")

    def table(self) -> Table:
        data = self._data
        if data.get("schema") != SCHEMA:
            self._problems.append(f"schema must be {SCHEMA}")
        if data.get("architectures") and not data.get("differences"):
            self._problems.append("differences must say how llama.cpp changes this family")
        classes = data.get("classes", {})
        return Table(
            name=self._name,
            family=data.get("family", self._name),
            differences=data.get("differences", ""),
            architectures=tuple(data.get("architectures", ())),
            projectors=tuple(data.get("projectors", ())),
            component=data.get("component", "text"),
            variables=self._expressions("variables", data.get("variables", {})),
            checks=self._expressions("checks", data.get("checks", {})),
            classes={
                kind: {
                    key: template
                    for key, text in fields.items()
                    if key != "projectors" and (template := self._template(f"classes.{kind}", text))
                }
                for kind, fields in classes.items()
            },
            blocks=tuple(self._blocks()),
            groups=tuple(self._groups()),
            experts=dict(self._experts()),
            quantized=self._formats(),
            fused=self._modules("fused"),
            finer=self._modules("finer"),
            unquantized=dict(data.get("unquantized", {})),
            folds=dict(self._folds()),
            config=self._fields("config", data.get("config", {})),
            multimodal=self._fields("multimodal", data.get("multimodal", {})),
            files={
                name: self._fields(f"files.{name}", fields)
                for name, fields in data.get("files", {}).items()
                if self._plain_file_name(name)
            },
            accepts_projectors=tuple(classes.get("multimodal", {}).get("projectors", ())),
            tokenizer=dict(data.get("tokenizer", {})),
        )

    def _plain_file_name(self, name: str) -> bool:
        if re.fullmatch(r"\w[\w.-]*\.json", name):
            return True
        self._problems.append(f"files: {name!r} isn't a plain name of a JSON file")
        return False

    def _expression(self, where: str, source: Any) -> Expression | None:
        try:
            return Expression(str(source) if isinstance(source, bool | int | float) else source)
        except ExpressionError as error:
            self._problems.append(f"{where}: {error}")
            return None

    def _template(self, where: str, source: Any) -> Template | None:
        try:
            return Template(source)
        except ExpressionError as error:
            self._problems.append(f"{where}: {error}")
            return None

    def _expressions(self, where: str, section: dict[str, Any]) -> dict[str, Expression]:
        found = {key: self._expression(f"{where}.{key}", text) for key, text in section.items()}
        return {key: expression for key, expression in found.items() if expression is not None}

    def _modules(self, section: str) -> dict[str, tuple[Template, ...]]:
        return {
            name: tuple(t for m in members if (t := self._template(f"{section}.{name}", m)))
            for name, members in self._data.get(section, {}).items()
        }

    def _fields(self, where: str, section: dict[str, Any]) -> Fields:
        derived = self._expressions(f"{where}.derived", _flat(section.get("derived", {})))
        return Fields(derived, _flat(section.get("constants", {})))

    def _blocks(self) -> Iterator[Block]:
        for number, block in enumerate(self._data.get("blocks", ())):
            when = self._expression(f"blocks[{number}].when", block.get("when", "True"))
            prefix = self._template(f"blocks[{number}].prefix", block.get("prefix"))
            if when is not None and prefix is not None:
                yield Block(when, prefix, block.get("component"))

    def _experts(self) -> Iterator[tuple[Template, tuple[Template, ...]]]:
        for stacked, modules in self._data.get("experts", {}).items():
            where = f"experts.{stacked!r}"
            key = self._template(where, stacked)
            names = tuple(t for module in _listed(modules) if (t := self._template(where, module)))
            if key is not None:
                yield key, names

    def _folds(self) -> Iterator[tuple[str, FoldRule]]:
        for title, rule in self._data.get("fold", {}).items():
            where = f"fold.{title!r}"
            writer = self._template(where, rule.get("from"))
            readers = tuple(
                t for name in rule.get("into", ()) if (t := self._template(where, name))
            )
            heads = self._expression(where, rule["heads"]) if "heads" in rule else None
            if not readers:
                self._problems.append(f"{where}: into must name the matrices that read it")
            elif writer is not None:
                yield title, FoldRule(writer, readers, float(rule.get("added", 0)), heads)

    def _formats(self) -> Formats | None:
        section = self._data.get("quantized")
        if section is None:
            return None
        variants, others = section.get("variants", {}), section.get("others", "")
        if not variants or not others:
            self._problems.append("quantized needs variants, and others: why there are no more")
        return Formats(variants, others)

    def _groups(self) -> Iterator[Group]:
        for title, group in self._data.get("tensors", {}).items():
            where = f"tensors.{title!r}"
            when = self._expression(where, group["when"]) if "when" in group else None
            entries: list[Entry] = []
            for key, value in group.items():
                if key not in GROUP_KEYS:
                    entries.extend(self._entries(f"{where}.{key!r}", key, value))
            yield Group(
                title, tuple(entries), when, bool(group.get("optional")), group.get("component")
            )

    def _entries(self, where: str, key: str, value: Any) -> Iterator[Entry]:
        if isinstance(value, str):
            value = {"to": value}
        if not isinstance(value, dict) or ("to" in value) == ("drop" in value):
            self._problems.append(
                f"{where} needs an output name, or a table with either to or drop"
            )
            return
        for unknown in sorted(value.keys() - ENTRY_KEYS):
            self._problems.append(f"{where}: the key {unknown!r} isn't known")
        if value.get("dtype") not in (None, *DTYPES):
            self._problems.append(f"{where}: dtype must be one of {DTYPES}")
        if not isinstance(value.get("drop", ""), str) or value.get("to") == []:
            self._problems.append(f"{where} needs an output name, or the reason why it is dropped")
        try:
            yield Entry(
                parts=tuple(Pattern(part) for part in key.split(" + ")),
                to=tuple(Template(name) for name in _listed(value.get("to"))),
                by=tuple(OperationCall(call) for call in _listed(value.get("by"))),
                dtype=value.get("dtype"),
                when=Expression(value["when"]) if "when" in value else None,
                drop=value.get("drop"),
            )
        except ExpressionError as error:
            self._problems.append(f"{where}: {error}")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one level of dotted keys; empty ones and lists are values."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
