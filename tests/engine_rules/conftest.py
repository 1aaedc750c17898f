"""Recordings of the engines: from files, or made anew.

With GGUF2ST_ENGINES=1 a recorder runs instead of reading its file, where its engine can
be imported. GGUF2ST_SGLANG_PYTHON names the Python that has SGLang (the two engines want
different environments); GGUF2ST_VLLM_PYTHON one that has vLLM and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHONS = {
    "vllm": os.environ.get("GGUF2ST_VLLM_PYTHON", sys.executable),
    "hf": os.environ.get("GGUF2ST_VLLM_PYTHON", sys.executable),
    "sglang": os.environ.get("GGUF2ST_SGLANG_PYTHON", sys.executable),
}
PACKAGES = {"vllm": "vllm", "hf": "transformers, compressed_tensors", "sglang": "sglang"}


def _has(engine: str) -> bool:
    command = [PYTHONS[engine], "-c", f"import importlib.util as u; import {PACKAGES[engine]}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Engine -> what it built of the tiny models, and its answers to the random cases."""

    @cache
    def load(engine: str) -> dict[str, Any]:
        path = HERE / "recorded" / f"{engine}.json"
        if os.environ.get("GGUF2ST_ENGINES") == "1" and _has(engine):
            path = tmp_path_factory.mktemp("engines") / path.name
            module = f"tests.engine_rules.recorders.record_{engine}"
            subprocess.run(
                [PYTHONS[engine], "-m", module, str(path)], check=True, cwd=HERE.parent.parent
            )
        document: dict[str, Any] = json.loads(path.read_text())
        return document

    return load
