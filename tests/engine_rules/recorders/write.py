"""How recordings are kept: one JSON file for each engine, readable in a diff."""

from __future__ import annotations

import hashlib
import json
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from tests.engine_rules.recorders.cases import cases


@cache
def digest() -> str:
    """Changes when the random configurations do."""
    text = json.dumps([[c.key, c.config, c.quantized] for c in cases()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write(
    path: Path,
    layers: dict[str, Any],
    answers: list[dict[str, str]],
    shapes: dict[str, str] | None = None,
) -> None:
    """Write what an engine built, and its answers to the random configurations and shapes."""
    # Per case, answers in the order of the names: "-" unquantized, "!" refused.
    rows = [" ".join(answer for _, answer in sorted(case.items())) for case in answers]
    asked: dict[str, list[str]] = {}
    for case, answer in zip(cases(), answers, strict=True):
        asked.setdefault(case.key, sorted(answer))
    document = {
        "cases": digest(),
        "layers": layers,
        "asked": asked,
        "answers": rows,
        "shapes": {kind: textwrap.wrap(text, 96) for kind, text in (shapes or {}).items()},
    }
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
