"""What the engines' matching functions have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from gguf2st.engines.names import Packed

REGEX = "re:"


class PartlyMatchedError(Exception):
    """Some shards of a fused layer are matched and some are not; the engine refuses to start."""

    def __init__(self, name: str, shards: Sequence[str]) -> None:
        super().__init__(f"some but not all of {', '.join(shards)} are ignored in {name}")


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """A compiled regular expression."""
    return re.compile(pattern)


def equal_or_regex(value: str, target: str, *, contains: bool = False) -> bool:
    """Whether a target is the value, or a regex ("re:...") that matches at its start.

    With `contains`, a plain target matches anywhere, whatever the case. vLLM:
    quantization/utils/config_utils.py; SGLang: compressed_tensors/utils.py, both
    is_equal_or_regex_match.
    """
    if target.startswith(REGEX):
        return compiled(target[len(REGEX) :]).match(value) is not None
    if contains:
        return target.lower() in value.lower()
    return target == value


def shard_names(name: str, packed: Packed) -> list[str] | None:
    """Names of the shards of a fused layer, or None where its last component isn't in `packed`.

    Like the engines, this replaces the component wherever it occurs in the name.
    """
    last = name.rpartition(".")[2]
    if last not in packed:
        return None
    return [name.replace(last, part) for part in packed[last]]


def all_or_none(name: str, shards: Sequence[str], matched: Iterable[bool]) -> bool:
    """Whether all shards match. Raises `PartlyMatchedError` when only some do."""
    results = list(matched)
    if any(results) and not all(results):
        raise PartlyMatchedError(name, shards)
    return all(results)


def first_match(value: str, targets: Iterable[str], *, contains: bool = False) -> str | None:
    """The first target that matches (vLLM and SGLang: _find_first_match)."""
    return next((t for t in targets if equal_or_regex(value, t, contains=contains)), None)


def fused_match(name: str, targets: Sequence[str], packed: Packed) -> str | None:
    """The target of a fused layer's first shard, if every shard has one (_match_fused_layer).

    Unlike ignore entries this looks for the first key of `packed` that ends the name.
    """
    fused = next((key for key in packed if name.endswith(key)), None)
    if fused is None:
        return None
    matches = [first_match(name.replace(fused, part), targets) for part in packed[fused]]
    return matches[0] if all(matches) else None


def gptq_override(name: str, dynamic: Mapping[str, Any]) -> Literal[False] | dict[str, Any] | None:
    """GPTQ's "dynamic": False skips the layer, a dict overrides values, None is neither.

    vLLM: quantization/utils/gptq_utils.py; SGLang: quantization/utils.py, both
    get_dynamic_override.
    """
    for pattern, values in dynamic.items():
        if pattern.startswith("-:"):
            if compiled(pattern.removeprefix("-:")).match(name):
                return False
        elif compiled(pattern.removeprefix("+:")).match(name):
            return dict(values)
    return None
