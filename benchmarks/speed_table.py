"""Tables of what the benchmarks of speed measured, and whether that is what was aimed at.

    python -m benchmarks.speed_table benchmarks/speed docs/speed.md

The directory holds decoding.json, conversion.json, growth.json and opening.json, or some of them. What
lies between the markers of the Markdown file is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("decoding", "conversion", "growth", "opening")
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
Results = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """Something to reach: what, at least or at most how much, and what was measured of it."""

    what: str
    limit: float
    values: Mapping[str, float]
    unit: str = "x"
    at_most: bool = False

    @property
    def met(self) -> bool:
        worst = (max if self.at_most else min)(self.values.values())
        return worst <= self.limit if self.at_most else worst >= self.limit

    def row(self) -> str:
        sign = "<=" if self.at_most else ">="
        values = ", ".join(f"{name} {number(value)}" for name, value in self.values.items())
        met = "yes" if self.met else "**no**"
        return f"| {self.what} | {sign} {self.limit:g}{self.unit} | {values} | {met} |"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def compared_threads(entry: Results) -> int:
    """Two, for which the aims were set, or what there is."""
    return 2 if 2 in entry["threads"] else max(entry["threads"])


def wanted_of_gguf_py(name: str) -> float | None:
    """How many times as fast as gguf-py decoding to bfloat16 should be."""
    if name.startswith(("IQ2", "IQ3")):
        return 10
    return {"Q4_0": 4, "Q4_K": 4, "Q5_K": 4, "Q6_K": 3, "Q8_0": 3, "IQ4_XS": 8}.get(name)


def wanted_of_ggml(name: str) -> float:
    """How many times as fast as ggml's C code decoding to float32 should be."""
    if name.startswith(("IQ2", "IQ3")):
        return 2
    return 0.7 if name in ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS") else 0.5


def load(directory: Path) -> dict[str, Any]:
    """The results that are there."""
    paths = {name: directory / f"{name}.json" for name in NAMES}
    return {name: json.loads(p.read_text("utf-8")) for name, p in paths.items() if p.exists()}


def bars(results: Results) -> Iterator[Bar]:
    """Every aim that something was measured of."""
    for part, found in (
        ("decoding", _decoding_bars),
        ("conversion", _conversion_bars),
        ("growth", _growth_bars),
        ("opening", _opening_bars),
    ):
        if part in results:
            yield from (bar for bar in found(results[part]) if bar.values)


def _grouped(
    types: Results, ratio: str, wanted: Callable[[str], float | None]
) -> dict[float, dict[str, float]]:
    groups: dict[float, dict[str, float]] = {}
    for name, found in types.items():
        limit = wanted(name)
        if limit is not None and ratio in found["ratios"]:
            groups.setdefault(limit, {})[name] = found["ratios"][ratio]
    return groups


def _decoding_bars(found: Results) -> Iterator[Bar]:
    for limit, values in _grouped(found["types"], "bf16 / gguf-py", wanted_of_gguf_py).items():
        yield Bar("decoding to bf16, against gguf-py", limit, values)
    for limit, values in _grouped(found["types"], "f32 / ggml", wanted_of_ggml).items():
        yield Bar("decoding to f32, against ggml's C code", limit, values)
    speedups = {
        name: task["speedup"]["2"]
        for name, task in found["threads"].items()
        if "2" in task["speedup"]
    }
    yield Bar("two threads against one", 1.7, speedups)
    yield Bar(
        "int4 to nearest, fused, against decoding to bf16",
        0.3,
        {
            f"{name} {ratio.split(' / ')[0]}": value
            for name, kind in found["int4"].items()
            for ratio, value in kind["ratios"].items()
        },
    )
    for group, limit in (("g128", 80), ("g32", 50)):
        rates = {
            name: rate / 1e6
            for name, rate in found["search"]["rates"].items()
            if name.split()[1] == group
        }
        yield Bar(f"search for scales, {group}, one thread", limit, rates, " M/s")


def _conversion_bars(found: Results) -> Iterator[Bar]:
    models: Results = found["models"]

    def ratios(name: str, what: str) -> dict[str, float]:
        return {
            model: entry["ratios"][name.format(compared_threads(entry))][what]
            for model, entry in models.items()
            if name.format(compared_threads(entry)) in entry["ratios"]
        }

    written = ratios("bf16, {} / write bf16", "wall")
    yield Bar("whole bf16 conversion against writing the bytes", 1.5, written, at_most=True)
    for what, limit in (("wall", 4), ("cpu", 5), ("peak", 10)):
        shown = {"wall": "seconds", "cpu": "CPU seconds", "peak": "peak memory"}[what]
        values = ratios("gguf-py / bf16, {}", what)
        yield Bar(f"gguf-py and save_file against whole conversion, {shown}", limit, values)
    if "first use" in found:
        compiling = {to: figures["told"] for to, figures in found["first use"]["compiling"].items()}
        yield Bar(
            "CPU seconds of a first conversion more than of a later one",
            3,
            compiling,
            " s",
            at_most=True,
        )


def _growth_bars(found: Results) -> Iterator[Bar]:
    peaks: dict[str, float] = {}
    largest = max(map(float, found["sizes"]), default=0)
    for entry in found["sizes"].values():
        for to, figures in entry["medians"].items():
            key = f"{to} up to {largest:g} GB"
            peaks[key] = max(peaks.get(key, 0), figures["peak"] / 1e6)
    for name in ("embedding", "experts"):
        if name in found:
            for to, figures in found[name]["medians"].items():
                peaks[f"{name} {to}"] = figures["peak"] / 1e6
    yield Bar("peak memory", 500, peaks, " MB", at_most=True)
    spread = {
        to: (line["highest_peak"] - line["lowest_peak"]) / 1e6
        for to, line in found.get("lines", {}).items()
    }
    yield Bar("peak memory, largest less smallest model", 60, spread, " MB", at_most=True)
    straight = {
        f"{to} {what}": line[what]["r2"]
        for to, line in found.get("lines", {}).items()
        for what in ("wall", "cpu")
    }
    yield Bar("growth with size, R^2 of a straight line", 0.98, straight, "")


def _opening_bars(found: Results) -> Iterator[Bar]:
    yield Bar(
        "opening, against GGUFReader", 50, {found["file"]: found["ratios"]["gguf2st"]["wall"]}
    )
    peak = found["medians"]["gguf2st"]["peak"] / 1e6
    yield Bar("opening, peak memory", 60, {found["file"]: peak}, " MB", at_most=True)
    if "start" in found:
        started = found["start"]["medians"]
        seconds = {name: started[name]["wall"] for name in ("--help", "import")}
        yield Bar("start-up", 0.3, seconds, " s", at_most=True)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heading = list(head)
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def types_table(found: Results) -> str:
    """Millions of elements per second of every type, by everyone."""
    columns = ("bf16", "gguf-py bf16", "ggml bf16", "f32", "gguf-py f32", "ggml f32")
    return _table(
        ["type", *columns],
        (
            [
                name,
                *(
                    number(kind["rates"][column] / 1e6) if column in kind["rates"] else "-"
                    for column in columns
                ),
            ]
            for name, kind in found["types"].items()
        ),
    )


def conversions_table(found: Results) -> str:
    """Seconds and memory of all ways."""
    rows = (
        [
            model,
            name,
            *(f"{figures[what]:.1f}" for what in ("wall", "cpu")),
            f"{figures['peak'] / 1e6:.0f}",
            f"{figures['output'] / 1e9:.2f}",
        ]
        for model, entry in found["models"].items()
        for name, figures in entry["medians"].items()
    )
    failures = "".join(
        f"\n\n{name} failed with {model}: {reason}"
        for model, entry in found["models"].items()
        for name, reason in entry["failed"].items()
    )
    head = ("model", "way, threads", "seconds", "CPU seconds", "peak MB", "output GB")
    return _table(head, rows) + failures


def growth_table(found: Results) -> str:
    """Seconds and memory by size, and the lines through them."""
    rows = [
        [
            name,
            to,
            f"{figures['output'] / 1e9:.2f}",
            *(f"{figures[what]:.1f}" for what in ("wall", "cpu")),
            f"{figures['peak'] / 1e6:.0f}",
        ]
        for name, entry in {
            **found["sizes"],
            **{name: found[name] for name in ("embedding", "experts") if name in found},
        }.items()
        for to, figures in entry["medians"].items()
    ]
    lines = "".join(
        f"\n\n{to}, {'seconds' if what == 'wall' else 'CPU seconds'}: {line[what]['intercept']:.2f} + "
        f"{line[what]['slope']:.2f} for each GB of the model as bf16, R^2 {line[what]['r2']:.4f}"
        for to, line in found.get("lines", {}).items()
        for what in ("wall", "cpu")
    )
    head = ("model (GB as bf16)", "format", "output GB", "seconds", "CPU seconds", "peak MB")
    return _table(head, rows) + lines


def document(results: Results) -> str:
    """All tables as Markdown."""
    parts = ["\n".join(["| aim | bar | measured | met |", "|---|---|---|---|"])]
    parts[0] += "".join(f"\n{bar.row()}" for bar in bars(results))
    for part, title, table in (
        ("decoding", "Millions of elements per second, one thread", types_table),
        ("conversion", "Whole conversions", conversions_table),
        ("growth", "Growth with size", growth_table),
    ):
        if part in results:
            parts += [f"## {title}", table(results[part]), machine_line(results[part]["machine"])]
    return "\n\n".join(parts)


def machine_line(machine: Results) -> str:
    """What the figures were measured on."""
    packages = ("python", "numpy", "numba", "gguf", "safetensors", "torch", "transformers")
    versions = ", ".join(f"{name} {machine[name]}" for name in packages if name in machine)
    compiler = f"; ggml by {machine['compiler']}" if "compiler" in machine else ""
    load = f"load {machine.get('load', '?')} before and {machine.get('load_after', '?')} after"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, {load}; "
        f"{versions}{compiler}."
    )


def main() -> None:
    results = load(Path(sys.argv[1]))
    if not results:
        raise SystemExit(f"{sys.argv[1]} holds none of {', '.join(f'{n}.json' for n in NAMES)}.")
    text = document(results)
    if len(sys.argv) < 3:
        print(text)
        return
    path = Path(sys.argv[2])
    pattern = re.compile(f"{BEGIN}.*{END}", re.DOTALL)
    before = path.read_text("utf-8")
    if not pattern.search(before):
        raise SystemExit(f"{path} lacks the lines {BEGIN} and {END}.")
    path.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", before), "utf-8")


if __name__ == "__main__":
    main()
