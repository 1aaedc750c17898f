"""What more bits gain in each class of matrices, for each byte that they cost.

    python -m benchmarks.gains model.gguf --imatrix FILE [--out gains.json]

Every class of the mapping table's [finer], and the experts that it doesn't list, goes up by itself from int4 g128
to int4 g32, and from there (all others being int4 g32) to int8 g32. Measured as in quality.py; `--quality` and
`--bits-per-weight` take the steps in the order that such tables show.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf2st
from benchmarks.quality import Laboratory, Recipe
from gguf2st.mapping import resolve
from gguf2st.modules import modules_of

SCHEMES = ("int4-g32", "int8-g32")


def classes_of(gguf: Path) -> dict[str, str]:
    """For each class, in the table's order, a regular expression for the names of its modules."""
    resolution = resolve(gguf2st.open_model(gguf))
    names = list(resolution.table.finer)
    found: dict[str, set[str]] = {name: set() for name in [*names, "experts"]}
    for recipe in resolution.recipes:
        name = "experts" if recipe.priority is None else names[recipe.priority]
        for module in modules_of(recipe):
            if recipe.unquantized is None:
                found[name].add(re.sub(r"\d+", "[0-9]+", module.name.replace(".", "[.]")))
    return {name: f"^({'|'.join(sorted(modules))})$" for name, modules in found.items() if modules}


def gains(laboratory: Laboratory, classes: dict[str, str]) -> Iterator[dict[str, Any]]:
    """KL divergence and bytes of the whole, and what each class takes away and adds."""
    for rung, (group_size, scheme) in enumerate(zip((None, 32), SCHEMES, strict=True)):
        base: dict[str, Any] = {"bits": 4, "group_size": group_size, "symmetric": True}
        whole = laboratory.convert(Recipe("base", target=base, imatrix=True))
        yield {"rung": rung, "class": "", "kl": whole["kl"], "bytes": whole["bytes"]}
        for name, pattern in classes.items():
            mixed = base | {"mixed": ((pattern, scheme),)}
            found = laboratory.convert(Recipe(name, target=mixed, imatrix=True))
            gained, added = whole["kl"] - found["kl"], found["bytes"] - whole["bytes"]
            yield {"rung": rung, "class": name, "kl": gained, "bytes": added}


def told(row: dict[str, Any]) -> str:
    """One line for a row of `gains`."""
    megabytes = row["bytes"] / 1e6
    if not row["class"]:
        below = ("int4 g128", "int4 g32")[row["rung"]]
        return f"\nall {below}: KL {row['kl']:.4f}, {megabytes:.1f} MB"
    each = f"{1000 * row['kl'] / megabytes:8.3f} thousandths for each MB" if megabytes else ""
    scheme = SCHEMES[row["rung"]]
    return f"{row['class']:17} to {scheme}: KL -{row['kl']:.4f} for {megabytes:6.2f} MB, {each}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--imatrix", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        laboratory = Laboratory(arguments.gguf, arguments.imatrix, Path(directory))
        rows = []
        for row in gains(laboratory, classes_of(arguments.gguf)):
            print(told(row), flush=True)
            rows.append(row)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
