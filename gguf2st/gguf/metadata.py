"""The keys of a file, decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PackedString:
    """A string value that has been stepped over but not decoded."""

    start: int
    end: int


@dataclass(frozen=True)
class PackedArray:
    """An array value that has been stepped over but not decoded."""

    item_type: int
    count: int
    start: int


class Metadata(Mapping[str, Any]):
    """The keys of a file.

    Numbers are Python values. Strings and arrays are decoded on look-up:
    strings to str (bytes that aren't UTF-8 survive as surrogate escapes), arrays
    of strings to a list, of numbers to a numpy array. The list decoded last is kept,
    since several readers in turn want the vocabulary: don't change it.
    """

    def __init__(self, values: dict[str, Any], decode: Any) -> None:
        self._values = values
        self._decode = decode
        self._last: tuple[str, list[str]] | None = None

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, PackedString | PackedArray):
            return value
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        decoded = self._decode(value)
        if isinstance(decoded, list):
            self._last = key, decoded
        return decoded

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def length(self, key: str) -> int | None:
        """Number of items of the array at `key`, without decoding it; None for a scalar."""
        value = self._values.get(key)
        return value.count if isinstance(value, PackedArray) else None
