"""What options say, as the library takes it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gguf2st.errors import UsageError

ENGINES = ("vllm", "sglang", "hf")
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 2GiB. Raises `UsageError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise UsageError(f"{text!r} isn't a size; write for example 5GB or 500MB.")
    return int(float(found[1]) * unit)


def parse_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Comma-separated names, each one of `known`. Raises `UsageError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name!r} isn't one of {', '.join(known)}.")
    if not names:
        raise UsageError(f"{option} needs one of {', '.join(known)}.")
    return names


def parse_engines(text: str) -> Sequence[str]:
    """Comma-separated engines, or all of them. Raises `UsageError`."""
    return ENGINES if text == "all" else parse_names("--engine", text, ENGINES)


def parse_sizes(text: str) -> list[int]:
    """Comma-separated tensor-parallel sizes. Raises `UsageError`."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UsageError(f"--tp {text!r} isn't a list of sizes; write for example 1,2,4.")
    return [int(size) for size in text.split(",")]


def parse_scheme(text: str) -> tuple[str, str]:
    """Expression and scheme of REGEX=SCHEME. Raises `UsageError`."""
    pattern, equals, scheme = text.rpartition("=")
    if not (pattern and equals):
        raise UsageError(f"--scheme {text!r} has no scheme; write for example self_attn=int8-g32.")
    return pattern, scheme
