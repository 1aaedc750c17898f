"""Time and memory of conversions as models grow, and of the two largest tensors that models have.

    python -m benchmarks.growth /disk/scratch --largest 20 --json benchmarks/growth.json
    python -m benchmarks.growth /disk/scratch --largest 1 --parts sizes

Sizes: synthetic models of 0.1 GB and more in bfloat16, up to `--largest`. Their weights are holes in
the file, so only the output needs room: a tenth more than the largest. Each conversion is a fresh process
and its output is deleted at once. A straight line is fitted to seconds over the size of the model.
Extremes: an embedding of 248,320 x 5,120, and a layer whose stacked experts take `--stack` GB.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf2st
from benchmarks.conversion import command, measured
from benchmarks.measuring import (
    Run,
    cores,
    interleaved,
    machine,
    median,
    need_disk,
    straight_line,
    write_json,
)
from benchmarks.sparse import Decoder

SIZES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
FORMATS = ("bf16", "awq")
EMBEDDING = Decoder(1, hidden=5120, mlp=256, queries=2, keys=1, vocabulary=248_320)
EXPERTS, EXPERT_HIDDEN = 128, 5120


def model_of(gigabytes: float) -> Decoder:
    """Blocks of 96 MB in bfloat16 up to a size, with an embedding of 34 MB."""
    embedding = Decoder(0).parameters
    return Decoder(max(1, round((gigabytes * 5e8 - embedding) / Decoder(1).layer_parameters)))


def stack_of(gigabytes: float) -> Decoder:
    """One block whose three stacks of experts take so much together in bfloat16."""
    mlp = gigabytes * 5e8 / 3 / EXPERTS / EXPERT_HIDDEN
    return Decoder(1, hidden=EXPERT_HIDDEN, mlp=max(256, round(mlp / 256) * 256), experts=EXPERTS)


def planned(model: Path, to: str, threads: int) -> dict[str, int]:
    """What gguf2st says in advance: bytes of the output and of memory."""
    opened = gguf2st.open_model(model)
    plan = gguf2st.make_plan(opened, gguf2st.PlanOptions(to=to, threads=threads))
    return {"output": plan.total_bytes, "peak": plan.peak_memory}


def converted(
    decoder: Decoder,
    scratch: Path,
    formats: Sequence[str],
    threads: int,
    rounds: int,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Convert one sparse model to each format, in turn."""
    model = decoder.write(scratch / "model.gguf")
    try:
        plans = {to: planned(model, to, threads) for to in formats}
        need_disk(scratch, max(plan["output"] for plan in plans.values()))
        output = scratch / "output"
        words = {to: command(model, output, to, threads, options) for to in formats}
        runs = interleaved(
            {to: partial(measured, words[to], output) for to in formats}, rounds, warm_up=0
        )
        # Documents are some kilobytes beside the weights.
        for to, plan in plans.items():
            assert 0 <= plan["output"] - runs[to][0]["output"] < 0.01 * plan["output"] + 20e6
        return {
            "parameters": decoder.parameters,
            "source_bytes": model.stat().st_size,
            "planned": plans,
            "medians": {to: _medians(found) for to, found in runs.items()},
            "runs": runs,
        }
    finally:
        model.unlink()


def _medians(runs: list[Run]) -> dict[str, float]:
    return {what: median(runs, what) for what in ("wall", "cpu", "peak", "output")}


def lines(sizes: dict[str, Any], formats: Sequence[str]) -> dict[str, Any]:
    """For each format: straight lines of seconds over GB of the model as bf16; the range of the peaks."""
    found: dict[str, Any] = {}
    for to in formats:
        runs = [
            (size["parameters"] / 5e8, run) for size in sizes.values() for run in size["runs"][to]
        ]
        peaks = [run["peak"] for _, run in runs]
        found[to] = {
            what: straight_line([size for size, _ in runs], [run[what] for _, run in runs])
            for what in ("wall", "cpu")
        } | {"lowest_peak": min(peaks), "highest_peak": max(peaks)}
    return found


def show(name: str, found: dict[str, Any]) -> None:
    for to, figures in found["medians"].items():
        print(
            f"{name:12} {to:6} {figures['output'] / 1e9:6.2f} GB {figures['wall']:8.2f} s wall "
            f"{figures['cpu']:8.2f} s CPU {figures['peak'] / 1e6:6.0f} MB peak",
            flush=True,
        )


def show_lines(found: dict[str, Any]) -> None:
    for to, fitted in found.items():
        for what in ("wall", "cpu"):
            line = fitted[what]
            print(
                f"{to:6} {what:4}: {line['intercept']:.2f} s + {line['slope']:.3f} s/GB, "
                f"R^2 {line['r2']:.4f}"
            )
        print(
            f"{to:6} peak: {fitted['lowest_peak'] / 1e6:.0f} to {fitted['highest_peak'] / 1e6:.0f} MB"
        )


def short(scratch: Path) -> dict[str, Any]:
    """Plans of the large models, and conversions of tiny ones."""
    result: dict[str, Any] = {"machine": machine(), "sizes": {}, "plans": {}}
    # Reading the vocabulary of the embedding's model would take longer than all the rest.
    for name, decoder in {"experts": stack_of(10), "20 GB": model_of(20)}.items():
        model = decoder.write(scratch / "large.gguf")
        result["plans"][name] = planned(model, "bf16", 2)
        model.unlink()
        plan = result["plans"][name]
        # Every weight takes two bytes; norms and documents are little beside them.
        assert 1 <= plan["output"] / 2 / decoder.parameters < 1.02, name
        assert plan["peak"] < 500e6, name
    tiny = [
        Decoder(layers, hidden=256, mlp=512, queries=2, keys=1, experts=experts, vocabulary=512)
        for layers, experts in ((1, 0), (4, 4))
    ]
    for decoder in tiny:
        name = f"{decoder.parameters / 5e8:.3f}"
        result["sizes"][name] = converted(decoder, scratch, ("bf16",), threads=1, rounds=1)
    result["lines"] = lines(result["sizes"], ("bf16",))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="for the outputs, on the disk in question")
    parser.add_argument("--largest", type=float, default=20, help="GB in bfloat16; default: 20")
    parser.add_argument(
        "--stack", type=float, default=10, help="GB of stacked experts; default: 10"
    )
    parser.add_argument("--parts", default="sizes,embedding,experts", help="default: all three")
    parser.add_argument("--formats", default=",".join(FORMATS), help="default: bf16,awq")
    parser.add_argument("--threads", type=int, default=min(cores(), 4), help="default: up to 4")
    parser.add_argument("--rounds", type=int, default=2, help="default: 2")
    parser.add_argument("--max-memory", metavar="SIZE", help="passed on to gguf2st")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs to a file")
    parser.add_argument("--short", action="store_true", help="plan the large, convert tiny ones")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    formats, parts = arguments.formats.split(","), arguments.parts.split(",")
    options = ["--max-memory", arguments.max_memory] if arguments.max_memory else []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        scratch = Path(folder)
        if arguments.short:
            write_json(arguments.json, short(scratch))
            return
        result: dict[str, Any] = {
            "machine": machine(),
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "sizes": {},
        }

        def add(name: str, decoder: Decoder, kept: dict[str, Any], to: Sequence[str]) -> None:
            kept[name] = converted(
                decoder, scratch, to, arguments.threads, arguments.rounds, options
            )
            show(name, kept[name])
            write_json(arguments.json, result)

        if "sizes" in parts:
            sizes = [size for size in SIZES if size <= arguments.largest]
            need_disk(scratch, int(1e9 * max(sizes)))
            for size in sizes:
                add(f"{size:g}", model_of(size), result["sizes"], formats)
            result["lines"] = lines(result["sizes"], formats)
            show_lines(result["lines"])
        if "embedding" in parts:
            add("embedding", EMBEDDING, result, ["bf16"])  # no format quantizes it
        if "experts" in parts:
            add("experts", stack_of(arguments.stack), result, formats)
        result["machine"]["load_after"] = machine().get("load")
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
