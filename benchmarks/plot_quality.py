"""Draws what `quality.py` measured, and prints it as a table.

python benchmarks/plot_quality.py benchmarks/quality.json docs/quality.svg
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

WIDTH, ROW, LEFT, RIGHT, TOP = 860, 22, 290, 150, 48
COLOURS = {"smollm2": "#3b6fb6", "gemma3": "#c2703d"}
TITLES = {"smollm2": "SmolLM2 135M (Q4_1)", "gemma3": "Gemma 3 270M (Q4_K_M)"}


def drawing(results: dict[str, list[dict[str, Any]]]) -> str:
    """Bars of the KL divergence on a logarithmic axis, a pair for each recipe, as SVG."""
    recipes = list(dict.fromkeys(entry["recipe"] for rows in results.values() for entry in rows))
    found = {(model, entry["recipe"]): entry["kl"] for model in results for entry in results[model]}
    low, high = 1e-4, 2.0
    span = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        return LEFT + span * math.log(max(value, low) / low) / math.log(high / low)

    height = TOP + len(recipes) * ROW * 1.4 + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>',
        f'<text x="{LEFT}" y="18">KL divergence from the GGUF\'s own weights (logarithmic; less is better)</text>',
    ]
    for number, model in enumerate(results):
        parts.append(
            f'<rect x="{LEFT + 220 * number}" y="26" width="12" height="12" fill="{COLOURS[model]}"/>'
            f'<text x="{LEFT + 220 * number + 18}" y="37">{TITLES[model]}</text>'
        )
    for tick in (1e-4, 1e-3, 1e-2, 1e-1, 1):
        parts.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{height - 26:.0f}" stroke="#ddd"/>'
            f'<text x="{x(tick):.1f}" y="{height - 10:.0f}" text-anchor="middle" fill="#555">{tick:g}</text>'
        )
    for index, recipe in enumerate(recipes):
        top = TOP + index * ROW * 1.4
        parts.append(f'<text x="{LEFT - 8}" y="{top + 18:.0f}" text-anchor="end">{recipe}</text>')
        for number, model in enumerate(results):
            value = found.get((model, recipe))
            if value is None:
                continue
            y = top + 3 + number * 12
            parts.append(
                f'<rect x="{LEFT}" y="{y:.0f}" width="{max(1.0, x(value) - LEFT):.1f}" height="11" '
                f'fill="{COLOURS[model]}"/>'
                f'<text x="{x(value) + 5:.1f}" y="{y + 10:.0f}" font-size="10" fill="#333">{value:.4f}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The same as Markdown: bits of a quantized weight, KL, and top-1 agreement of each model."""
    models = list(results)
    lines = [
        "| recipe | bits | " + " | ".join(f"{TITLES[m]}: KL (top-1)" for m in models) + " |",
        "|---|---|" + "---|" * len(models),
    ]
    found = [{row["recipe"]: row for row in rows} for rows in results.values()]
    for recipe in dict.fromkeys(name for rows in found for name in rows):
        rows = [model.get(recipe) for model in found]
        cells = " | ".join(f"{row['kl']:.4f} ({row['top1']:.2f})" if row else "-" for row in rows)
        figures = (f"{row['bits_per_quantized_weight']:.2f}" for row in rows if row)
        lines.append(f"| {recipe} | {' / '.join(dict.fromkeys(figures))} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Path(sys.argv[2]).write_text(drawing(measured), "utf-8")
    print(table(measured))
