"""Compiled kernels are kept, and compiled anew when any file of the package changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gguf2st

pytest.importorskip("numba")

COMPILE = """
import numpy as np
from gguf2st.jit import watched
with watched(lambda: None) as watch:
    from gguf2st.rounding_kernels import not_finite
    assert not_finite(np.full(32, np.inf, np.float32)) == 32
print("compiled" if watch.seconds else "kept")
"""


def test_a_change_anywhere_in_the_package_counts(tmp_path: Path):
    package = tmp_path / "gguf2st"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(gguf2st.__file__).parent, package, ignore=ignored)
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
    }

    def run() -> str:
        arguments = [sys.executable, "-P", "-c", COMPILE]
        done = subprocess.run(
            arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert [run(), run()] == ["compiled", "kept"]
    with (package / "vectors" / "functions.py").open("a") as file:
        file.write("# changed\n")
    assert [run(), run()] == ["compiled", "kept"]
