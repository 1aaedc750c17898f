"""How the benchmarks measure: rounds in turn, ratios within a round, whole processes.

What is compared runs in turn, so that a slow moment of the machine hits all alike, and a ratio is the
median of the ratios within the rounds. Every run is kept.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
Run = dict[str, float]
"""Figures of one run: seconds ("wall", "cpu"), bytes ("peak") and others."""

# A child counts what its parent had in memory until exec, so the parent of what is measured has to
# be small: an interpreter without any package.
_LAUNCHER = """
import json, os, sys, time
started = time.perf_counter()
child = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(child, 0)
wall = time.perf_counter() - started
unit = 1 if sys.platform == "darwin" else 1024
with open(sys.argv[1], "w") as out:
    json.dump({"wall": wall, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * unit}, out)
sys.exit(os.waitstatus_to_exitcode(status) and 1)
"""


class ProcessError(Exception):
    """A measured process ended with an error; the message is the last line that it printed."""


def interleaved(
    subjects: Mapping[str, Callable[[], Run]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[Run]]:
    """Run all subjects once a round, every other round backwards, and return the runs of each.

    The first `warm_up` rounds are thrown away: they bring files and code into caches.
    """
    runs: dict[str, list[Run]] = {name: [] for name in subjects}
    for number in range(warm_up + rounds):
        for name in subjects if number % 2 else reversed(list(subjects)):
            run = subjects[name]()
            if number >= warm_up:
                runs[name].append(run)
    return runs


def median(runs: Iterable[Run], what: str) -> float:
    """Median of one figure."""
    return statistics.median(run[what] for run in runs)


def ratio(above: Sequence[Run], below: Sequence[Run], what: str) -> float:
    """Median over the rounds of one subject's figure by another's."""
    return statistics.median(
        a[what] / b[what] if b[what] else float("inf") for a, b in zip(above, below, strict=True)
    )


def process(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    told: Sequence[str] = (),
) -> Run:
    """Run a command and return its seconds and its peak of resident memory in bytes.

    `told` names figures to take over from the JSON that the command prints.
    CPU time is that of the process and of the children it waited for. Mapped files count as
    resident as far as they were touched. Raises `ProcessError`.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".json") as figures:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, figures.name, *command],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": python_path()} | (environment or {}),
        )
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise ProcessError(lines[-1] if lines else f"{command[0]} said nothing")
        report = json.loads(done.stdout) if told else {}
        return json.load(figures) | {name: report[name] for name in told}


def python_path() -> str:
    """PYTHONPATH with which a process imports this source tree."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def straight_line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least squares: slope, intercept, and R^2, the share of the variance that the line explains."""
    slope, intercept = np.polyfit(x, y, 1)
    rest = np.asarray(y) - (slope * np.asarray(x) + intercept)
    spread = np.asarray(y) - np.mean(y)
    explained = 1 - float(rest @ rest) / float(spread @ spread) if spread.any() else 1.0
    return {"slope": float(slope), "intercept": float(intercept), "r2": explained}


def need_disk(directory: Path, nbytes: int) -> None:
    """Exit with a sentence unless a directory has room for so many bytes and a tenth more."""
    free = shutil.disk_usage(directory).free
    if free < 1.1 * nbytes:
        raise SystemExit(
            f"{directory} has {free / 1e9:.1f} GB free and this needs {1.1 * nbytes / 1e9:.1f} GB; "
            "give another directory or a smaller size."
        )


def machine() -> dict[str, Any]:
    """What the figures depend on. `load` is the machine's load average when it is asked for."""
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in ("gguf2st", "numpy", "numba", "gguf", "safetensors", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 1)
    return found


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def write_json(path: Path | None, result: Any) -> None:
    """Write results; floats keep five digits, which is more than a clock is worth."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_short(result), indent=1)
    # What holds nothing nested goes on one line.
    text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: re.sub(r"\n\s*", " ", found[0]), text)
    path.write_text(text + "\n", "utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
