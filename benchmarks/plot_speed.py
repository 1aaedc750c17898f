"""Draws what the benchmarks of speed measured.

python -m benchmarks.plot_speed benchmarks/speed docs/speed.svg
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed_table import compared_threads, load, number, wanted_of_ggml, wanted_of_gguf_py

WIDTH, LEFT, RIGHT, GAP = 860, 190, 90, 24
BLUE, ORANGE, GREEN, GREY = "#3b6fb6", "#c2703d", "#4c9a6a", "#999"
COLOURS = (BLUE, ORANGE, GREEN, GREY)
Results = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One bar: its value, colour, and the value aimed at."""

    value: float
    colour: str
    aim: float | None = None


@dataclass(frozen=True)
class Panel:
    """A drawing of a certain height, placed by its top."""

    height: float
    draw: Callable[[float], list[str]]


def text(x: float, y: float, what: str, anchor: str = "start", **style: Any) -> str:
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{_escaped(what)}</text>'


def _escaped(what: str) -> str:
    return what.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def legend(y: float, names: Sequence[str], colours: Sequence[str]) -> list[str]:
    parts = []
    for index, (name, colour) in enumerate(zip(names, colours, strict=False)):
        x = LEFT + 160 * index
        parts.append(f'<rect x="{x}" y="{y - 10:.0f}" width="11" height="11" fill="{colour}"/>')
        parts.append(text(x + 16, y, name))
    return parts


def ticks(high: float) -> list[float]:
    """Three to six round numbers from zero up to a value."""
    power = 10 ** math.floor(math.log10(high))
    step = next(step for step in (power / 5, power / 2, power, 2 * power) if high / step < 6)
    return [step * count for count in range(math.floor(high / step) + 1)]


def bar_panel(
    title: str, rows: Sequence[tuple[str, Sequence[Bar]]], names: Sequence[str], unit: str
) -> Panel:
    """Groups of horizontal bars on a logarithmic axis; a short line marks an aim."""
    values = [bar.value for _, bars in rows for bar in bars]
    values += [bar.aim for _, bars in rows for bar in bars if bar.aim]
    low = 10 ** math.floor(math.log10(max(1e-3, min(values))))
    high = max(values) * 1.1
    step = max(len(bars) for _, bars in rows) * 11 + 6

    def x(value: float) -> float:
        span = WIDTH - LEFT - RIGHT
        return LEFT + span * math.log(max(value, low) / low) / math.log(high / low)

    def draw(top: float) -> list[str]:
        bottom = top + 40 + step * len(rows)
        parts = [text(LEFT, top + 12, title, font_weight="bold")]
        parts += legend(top + 30, names, [bar.colour for bar in rows[0][1]])
        power = math.log10(low)
        while 10**power <= high:
            at = x(10**power)
            parts.append(line(at, top + 38, at, bottom, "#888" if abs(power) < 0.5 else "#ddd"))
            parts.append(text(at, bottom + 13, f"{10**power:g}{unit}", "middle", fill="#555"))
            power += 1
        for index, (name, bars) in enumerate(rows):
            start = top + 42 + index * step
            parts.append(text(LEFT - 8, start + len(bars) * 5.5 + 4, name, "end"))
            for number_, bar in enumerate(bars):
                y = start + 11 * number_
                parts.append(
                    f'<rect x="{LEFT}" y="{y:.0f}" width="{max(1, x(bar.value) - LEFT):.1f}" '
                    f'height="10" fill="{bar.colour}"/>'
                )
                if bar.aim:
                    parts.append(line(x(bar.aim), y - 1, x(bar.aim), y + 11, "black", 2))
                end = max(x(bar.value), x(bar.aim or 0)) + 5
                parts.append(text(end, y + 9, f"{number(bar.value)}{unit}", font_size=10))
        return parts

    return Panel(40 + step * len(rows) + 20, draw)


def point_panel(
    title: str,
    axes: tuple[str, str],
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    lines: Sequence[tuple[float, float]] = (),
    aim: float | None = None,
) -> Panel:
    """Points of several series from zero, with straight lines (intercept, slope) or joined in order."""
    right = max(x for _, points in series for x, _ in points) * 1.05
    high = max([y for _, points in series for _, y in points] + ([aim] if aim else [])) * 1.1
    height = 190.0

    def draw(top: float) -> list[str]:
        base, span = top + 40 + height, WIDTH - LEFT - RIGHT

        def place(x: float, y: float) -> tuple[float, float]:
            return LEFT + span * x / right, base - height * y / high

        parts = [text(LEFT, top + 12, title, font_weight="bold")]
        parts += legend(top + 30, [name for name, _ in series], COLOURS)
        for tick in ticks(high):
            y = place(0, tick)[1]
            parts.append(line(LEFT, y, WIDTH - RIGHT, y, "#ddd"))
            parts.append(text(LEFT - 6, y + 4, number(tick), "end", fill="#555"))
        for tick in ticks(right):
            parts.append(text(place(tick, 0)[0], base + 14, number(tick), "middle", fill="#555"))
        parts.append(text(WIDTH - RIGHT, base + 28, axes[0], "end", fill="#555"))
        parts.append(text(LEFT - 6, top + 30, axes[1], "end", fill="#555"))
        if aim:
            parts.append(line(*place(0, aim), *place(right, aim), "black", 1.5))
        for index, (_, points) in enumerate(series):
            colour = COLOURS[index % len(COLOURS)]
            if lines:
                intercept, slope = lines[index]
                ends = (0, max(0, intercept)), (right, intercept + slope * right)
                parts.append(line(*place(*ends[0]), *place(*ends[1]), colour))
            else:
                for before, after in itertools.pairwise(points):
                    parts.append(line(*place(*before), *place(*after), colour))
            for point in points:
                cx, cy = place(*point)
                parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>')
        return parts

    return Panel(40 + height + 34, draw)


def panels(results: Results) -> Iterator[Panel]:
    """A panel for each thing that was measured."""
    if "decoding" in results:
        yield _types(results["decoding"]["types"])
        yield _threads(results["decoding"]["threads"])
    if "conversion" in results:
        yield _ways(results["conversion"]["models"])
    if "growth" in results and results["growth"].get("lines"):
        yield from _growth(results["growth"])


def _types(types: Results) -> Panel:
    rows = []
    for name, found in types.items():
        aims = {"bf16 / gguf-py": wanted_of_gguf_py(name), "f32 / ggml": wanted_of_ggml(name)}
        colours = {"bf16 / gguf-py": BLUE, "f32 / ggml": ORANGE}
        bars = [
            Bar(found["ratios"][key], colours[key], aims[key])
            for key in aims
            if key in found["ratios"]
        ]
        if bars:
            rows.append((name, bars))
    title = "Decoding in one thread: how many times as fast as the other (black: aimed at)"
    return bar_panel(title, rows, ["gguf-py, to bf16", "ggml's C code, to f32"], "x")


def _threads(tasks: Results) -> Panel:
    series = [
        (name, [(float(count), value) for count, value in found["speedup"].items()])
        for name, found in tasks.items()
    ]
    return point_panel("Speed of more threads against one", ("threads", "times as fast"), series)


def _ways(models: Results) -> Panel:
    rows = []
    names: list[str] = []
    for model, entry in models.items():
        ours = f"bf16, {compared_threads(entry)}"
        ways = {ours: BLUE, "write bf16": GREY, "gguf-py": ORANGE, "transformers": GREEN}
        present = {way: colour for way, colour in ways.items() if way in entry["medians"]}
        names = max(names, ["gguf2st", *list(present)[1:]], key=len)
        bars = [Bar(entry["medians"][way]["wall"], colour) for way, colour in present.items()]
        rows.append((model, bars))
    shown = ["plain write and fsync" if name == "write bf16" else name for name in names]
    return bar_panel("Whole conversion to bf16: seconds", rows, shown, " s")


def _growth(found: Results) -> Iterator[Panel]:
    def series(what: str, scale: float) -> list[tuple[str, list[tuple[float, float]]]]:
        return [
            (
                to,
                [
                    (size["parameters"] / 5e8, run[what] * scale)
                    for size in found["sizes"].values()
                    for run in size["runs"][to]
                ],
            )
            for to in found["lines"]
        ]

    axis = "GB of the model as bf16"
    walls = [line["wall"] for line in found["lines"].values()]
    yield point_panel(
        "Growth of the time with the model",
        (axis, "seconds"),
        series("wall", 1),
        [(wall["intercept"], wall["slope"]) for wall in walls],
    )
    yield point_panel(
        "Peak of resident memory (black: the most it may be)",
        (axis, "MB"),
        series("peak", 1e-6),
        aim=500,
    )


def drawing(results: Results) -> str:
    """All panels below each other, as SVG."""
    parts, top = [], 10.0
    for panel in panels(results):
        parts += panel.draw(top)
        top += panel.height + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{top:.0f}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawing(load(Path(sys.argv[1]))), "utf-8")
