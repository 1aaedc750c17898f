"""Time and memory of opening a GGUF, beside gguf-py's GGUFReader; and of starting at all.

    python -m benchmarks.opening                    a synthetic file with 262,144 tokens
    python -m benchmarks.opening model.gguf           a file of your own
    python -m benchmarks.opening --rounds 20 --json results.json

Each round opens the file once with each reader, in turn and each time in a fresh process, so that
a slow moment of the machine hits both. Only the opening is timed, not the start of Python and the
imports. "and tokens" also reads the vocabulary, which gguf2st decodes on demand.

Starting is measured from outside, as whole processes: an interpreter that does nothing, one that imports
gguf2st, and helps of the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.measuring import (
    Run,
    interleaved,
    machine,
    median,
    process,
    python_path,
    ratio,
    write_json,
)

TOKENS = 262_144

MEASURED = """
import json, os, pathlib, resource, sys, time

def resident():
    # VmHWM belongs to this process alone; ru_maxrss would include what its parent had before exec.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

{imports}
path = sys.argv[1]
before = resident()
wall, cpu = time.perf_counter(), time.process_time()
{action}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps(dict(wall=wall, cpu=cpu, peak=resident(), added=resident() - before, seen=seen)))
"""

READERS = {
    "gguf2st": (
        "from gguf2st.gguf import GgufFile",
        "file = GgufFile(path)\nseen = len(file.tensors)",
    ),
    "gguf2st and tokens": (
        "from gguf2st.gguf import GgufFile",
        "file = GgufFile(path)\nseen = len(file.metadata['tokenizer.ggml.tokens'])",
    ),
    "gguf-py": (
        "from gguf import GGUFReader",
        "file = GGUFReader(path)\nseen = len(file.tensors)",
    ),
    "gguf-py and tokens": (
        "from gguf import GGUFReader",
        "file = GGUFReader(path)\nseen = len(file.fields['tokenizer.ggml.tokens'].contents())",
    ),
}
PAIRS = (("gguf2st", "gguf-py"), ("gguf2st and tokens", "gguf-py and tokens"))
STARTS = {
    "python": ("-c", "pass"),
    "import": ("-c", "import gguf2st"),
    "--help": ("-m", "gguf2st.cli", "--help"),
    "convert --help": ("-m", "gguf2st.cli", "convert", "--help"),
}
START_ROUNDS = 20  # at least: each takes a fraction of a second
UNITS = {"wall": ("ms", 1e3), "cpu": ("ms", 1e3), "peak": ("MB", 1e-6), "added": ("MB", 1e-6)}


def write_synthetic(path: Path) -> None:
    """The keys of a model with a large vocabulary, and a few small tensors."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_uint32("gemma3.block_count", 18)
    writer.add_array("tokenizer.ggml.tokens", [f"token{number}" for number in range(TOKENS)])
    writer.add_array("tokenizer.ggml.scores", [-float(number) for number in range(TOKENS)])
    writer.add_array("tokenizer.ggml.token_type", [1] * TOKENS)
    for number in range(200):
        writer.add_tensor(f"blk.{number}.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(reader: str, path: Path) -> Run:
    imports, action = READERS[reader]
    script = MEASURED.replace("{imports}", imports).replace("{action}", action)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": python_path()},
    )
    return json.loads(done.stdout)


def compare(path: Path, rounds: int) -> dict[str, Any]:
    runs = interleaved({reader: partial(measure, reader, path) for reader in READERS}, rounds)
    for ours, theirs in PAIRS:
        if runs[ours][0]["seen"] != runs[theirs][0]["seen"]:
            raise SystemExit(f"{ours} and {theirs} don't see the same in {path}.")
    return {
        "file": path.name,
        "file_bytes": path.stat().st_size,
        "rounds": rounds,
        "machine": machine(),
        "medians": {
            reader: {what: median(found, what) for what in UNITS} for reader, found in runs.items()
        },
        "ratios": {
            ours: {what: ratio(runs[theirs], runs[ours], what) for what in UNITS}
            for ours, theirs in PAIRS
        },
        "runs": runs,
    }


def starting(rounds: int) -> dict[str, Any]:
    subjects = {name: partial(process, [sys.executable, *words]) for name, words in STARTS.items()}
    runs = interleaved(subjects, max(START_ROUNDS, rounds))
    figures = ("wall", "cpu", "peak")
    return {
        "medians": {
            name: {what: median(found, what) for what in figures} for name, found in runs.items()
        },
        "runs": runs,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['file']} ({result['file_bytes'] / 1e6:.0f} MB), median of {result['rounds']}:")
    heading = "".join(f"{f'{what}, {unit}':>12}" for what, (unit, _) in UNITS.items())
    print(f"{'':22}{heading}")
    for reader, found in result["medians"].items():
        row = "".join(f"{found[what] * scale:12.1f}" for what, (_, scale) in UNITS.items())
        print(f"{reader:22}{row}")
    for (ours, theirs), found in zip(PAIRS, result["ratios"].values(), strict=True):
        row = "".join(f"{f'{found[what]:.1f}x':>12}" for what in UNITS)
        print(f"{f'{theirs.split()[0]} / {ours}':22.22}{row}")
    rounds = len(result["start"]["runs"]["python"])
    print(f"starting, median of {rounds}:")
    for name, found in result["start"]["medians"].items():
        row = "".join(f"{found[what] * UNITS[what][1]:12.1f}" for what in found)
        print(f"{name:22}{row}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, help="default: a synthetic file")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs to a file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.file
        if path is None:
            path = Path(scratch) / "synthetic.gguf"
            write_synthetic(path)
        result = compare(path, arguments.rounds)
    result["start"] = starting(arguments.rounds)
    result["machine"]["load_after"] = machine().get("load")
    show(result)
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
