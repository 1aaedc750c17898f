"""Whole conversions, each in a fresh process, beside what else turns a GGUF into a checkpoint.

    python -m benchmarks.conversion /disk/scratch --json benchmarks/conversion.json
    python -m benchmarks.conversion /disk/scratch --models smollm2 --rounds 1 --without transformers

Models: SmolLM2 135M and Gemma 3 270M as published, and a filled synthetic one of `--size` GB in bfloat16.
In turn, for each: gguf2st to each format with one thread and more; a plain write of as many bytes in as
many files, with fsync, as gguf2st does too; gguf-py's reader and decoders with safetensors' save_file;
transformers' from_pretrained and save_pretrained. Outputs are deleted and the disk is synced in between.
The source is in the page cache. Compiling at first use is measured last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    ProcessError,
    Run,
    cores,
    interleaved,
    machine,
    median,
    need_disk,
    process,
    ratio,
    write_json,
)
from benchmarks.sparse import Decoder
from tests.oracles import real_models

FORMATS = ("bf16", "awq", "ct")
OTHERS = ("gguf-py", "transformers")
REAL = {"smollm2": real_models.smollm2, "gemma3": real_models.gemma3_270m}
FIGURES = ("wall", "cpu", "peak")

Check = Callable[[Path], None]


def command(
    model: Path, output: Path, to: str, threads: int, options: Sequence[str] = ()
) -> list[str]:
    """gguf2st's command line."""
    start = [sys.executable, "-m", "gguf2st.cli", "convert", str(model), "-o", str(output)]
    return [*start, "--to", to, "--threads", str(threads), "--force", *options]


def other(name: str, *arguments: object) -> list[str]:
    """Command of something to compare with."""
    return [sys.executable, "-m", "benchmarks.others", name, *map(str, arguments)]


def measured(
    words: Sequence[str],
    output: Path,
    environment: Mapping[str, str] | None = None,
    told: Sequence[str] = (),
    check: Check | None = None,
) -> Run:
    """Run a command that makes a directory, look at that, and delete it."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    try:
        run = process(words, environment, told)
        run["output"] = sum(size_of_files(output))
        if check is not None:
            check(output)
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return run


def size_of_files(directory: Path) -> list[int]:
    """Sizes of the weights' files, or of all where there are none."""
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.iterdir())
    return [path.stat().st_size for path in files]


def contents(directory: Path) -> Counter[tuple[str, str]]:
    """Shape and digest of every tensor, whatever its name."""
    found: Counter[tuple[str, str]] = Counter()
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            for entry in entries.values():
                start, stop = entry["data_offsets"]
                file.seek(8 + length + start)
                digest = hashlib.sha256(file.read(stop - start)).hexdigest()
                found[f"{entry['dtype']} {entry['shape']}", digest] += 1
    return found


def compare(
    model: Path,
    scratch: Path,
    *,
    formats: Sequence[str] = FORMATS,
    others: Sequence[str] = OTHERS,
    threads: Sequence[int] = (1, 2),
    rounds: int = 3,
    check: Check | None = None,
) -> dict[str, Any]:
    """All ways for one model. Each is tried once before the rounds; who fails then stays out.

    With no rounds the tries count. `check` looks at the bfloat16 checkpoints of gguf2st and gguf-py.
    """
    output = scratch / "output"
    subjects: dict[str, Callable[[], Run]] = {}
    failed: dict[str, str] = {}
    tries: dict[str, list[Run]] = {}
    for to in formats:
        sizes: list[int] = []

        def look(made: Path, to: str = to, sizes: list[int] = sizes) -> None:
            sizes[:] = size_of_files(made)
            if check is not None and to == "bf16":
                check(made)

        tried = measured(command(model, output, to, max(threads)), output, check=look)
        tries[f"{to}, {max(threads)}"] = [tried]
        write = partial(measured, other("write", output, *sizes), output)
        tries[f"write {to}"] = [write()]
        for count in threads:
            words = command(model, output, to, count)
            subjects[f"{to}, {count}"] = partial(measured, words, output)
        subjects[f"write {to}"] = write
    for name in others:
        words = other(name, model, output)
        try:
            tries[name] = [measured(words, output, check=check if name == "gguf-py" else None)]
        except ProcessError as error:
            failed[name] = str(error)
        else:
            subjects[name] = partial(measured, words, output)
    runs = interleaved(subjects, rounds, warm_up=0) if rounds else tries
    return {
        "model": model.name,
        "source_bytes": model.stat().st_size,
        "rounds": rounds,
        "threads": list(threads),
        "failed": failed,
        "medians": {
            name: {what: median(found, what) for what in (*FIGURES, "output")}
            for name, found in runs.items()
        },
        "ratios": _ratios(runs, formats, threads),
        "runs": runs,
    }


def _ratios(
    runs: dict[str, list[Run]], formats: Sequence[str], threads: Sequence[int]
) -> dict[str, dict[str, float]]:
    pairs = [(f"{to}, {count}", f"write {to}") for to in formats for count in threads]
    pairs += [(name, f"bf16, {count}") for name in OTHERS for count in threads]
    pairs += [(f"{to}, {min(threads)}", f"{to}, {max(threads)}") for to in formats]
    return {
        f"{above} / {below}": {what: ratio(runs[above], runs[below], what) for what in FIGURES}
        for above, below in pairs
        if above in runs and below in runs and above != below
    }


def first_use(model: Path, scratch: Path, threads: int, rounds: int) -> dict[str, Any]:
    """What compiling costs a user who converts for the first time."""
    output = scratch / "output"
    runs: dict[str, list[Run]] = {}
    for to in ("bf16", "awq"):
        words = command(model, output, to, threads, ["--json"])
        later = partial(measured, words, output, told=["compile_seconds"])
        runs |= interleaved(
            {f"{to}, first use": partial(_first_use, words, output), f"{to}, later": later},
            rounds,
            warm_up=0,
        )
    return {
        "model": model.name,
        "rounds": rounds,
        "medians": {
            name: {what: median(found, what) for what in FIGURES} for name, found in runs.items()
        },
        "compiling": {
            to: {
                "told": median(runs[f"{to}, first use"], "compile_seconds"),
                "told_later": median(runs[f"{to}, later"], "compile_seconds"),
                **{
                    what: median(runs[f"{to}, first use"], what)
                    - median(runs[f"{to}, later"], what)
                    for what in ("wall", "cpu")
                },
            }
            for to in ("bf16", "awq")
        },
        "runs": runs,
    }


def _first_use(words: Sequence[str], output: Path) -> Run:
    with tempfile.TemporaryDirectory() as empty:
        return measured(words, output, {"NUMBA_CACHE_DIR": empty}, ["compile_seconds"])


def filled_model(directory: Path, gigabytes: float) -> Path:
    """A synthetic model whose weights take so much as bfloat16."""
    layers = max(1, round(gigabytes * 1e9 / 2 / Decoder(1).layer_parameters))
    path = directory / f"synthetic-{gigabytes:g}GB.gguf"
    return Decoder(layers).write(path, filled=True)


def show(found: dict[str, Any]) -> None:
    print(f"{found['model']}, median of {found['rounds']}:")
    for name, figures in found["medians"].items():
        print(
            f"  {name:20} {figures['wall']:8.2f} s wall {figures['cpu']:8.2f} s CPU "
            f"{figures['peak'] / 1e6:8.0f} MB peak"
        )
    for name, figures in found.get("ratios", {}).items():
        print(f"  {name:28}", *(f"{what} {value:7.2f}x" for what, value in figures.items()))
    for name, reason in found.get("failed", {}).items():
        print(f"  {name} failed: {reason}")
    for to, figures in found.get("compiling", {}).items():
        print(
            f"  compiling for {to}: {figures['told']:.2f} s by its report, longer by "
            f"{figures['wall']:.2f} s and {figures['cpu']:.2f} s of CPU"
        )
    sys.stdout.flush()


def short(scratch: Path) -> dict[str, Any]:
    """A tiny model, once: gguf2st and gguf-py must write the same tensors."""
    model = Decoder(2, hidden=256, mlp=512, queries=2, keys=1, vocabulary=512).write(
        scratch / "tiny.gguf", filled=True
    )
    seen: list[Counter[tuple[str, str]]] = []
    result = compare(
        model,
        scratch,
        formats=("bf16",),
        others=("gguf-py",),
        threads=(1,),
        rounds=0,
        check=lambda made: seen.append(contents(made)),
    )
    assert not result["failed"], result["failed"]
    ours, theirs = seen
    assert ours == theirs, f"{(ours - theirs).total()} of {ours.total()} tensors differ"
    return {"machine": machine(), "models": {"tiny": result}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="for the outputs, on the disk in question")
    parser.add_argument("--models", default="smollm2,gemma3,synthetic", help="default: all three")
    parser.add_argument("--size", type=float, default=2, help="GB of the synthetic one; default: 2")
    parser.add_argument("--formats", default=",".join(FORMATS), help="default: bf16,awq,ct")
    parser.add_argument("--without", default="", help="gguf-py, transformers, first-use or several")
    parser.add_argument("--threads", default=f"1,{min(cores(), 4)}", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs to a file")
    parser.add_argument("--short", action="store_true", help="compare results, hardly measure")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    without = arguments.without.split(",")
    names = arguments.models.split(",")
    threads = sorted({int(count) for count in arguments.threads.split(",")})
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        scratch = Path(folder)
        if arguments.short:
            write_json(arguments.json, short(scratch))
            return
        # The source takes about a third of the output.
        need_disk(scratch, int(1.4e9 * (arguments.size if "synthetic" in names else 0.6)))
        result: dict[str, Any] = {"machine": machine(), "models": {}}
        for name in names:
            model = filled_model(scratch, arguments.size) if name == "synthetic" else REAL[name]()
            result["models"][name] = compare(
                model,
                scratch,
                formats=arguments.formats.split(","),
                others=[other for other in OTHERS if other not in without],
                threads=threads,
                rounds=arguments.rounds,
            )
            show(result["models"][name])
            write_json(arguments.json, result)
        if "first-use" not in without:
            found = first_use(REAL["gemma3"](), scratch, max(threads), arguments.rounds)
            result["first use"] = found
            show(found)
        result["machine"]["load_after"] = machine().get("load")
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
