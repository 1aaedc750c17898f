"""Engines as oracles: skipped where they aren't installed, but for the run that is for them."""

import os
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

# compressed-tensors and vLLM import transformers, and with it torchvision, in this process too.
runpy.run_path(str(Path(__file__).parents[1] / "engines" / "shim" / "sitecustomize.py"))


def need(*modules: str) -> None:
    """Skip without these modules, or fail where GGUF2ST_ENGINES says that they have to be there."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        message = f"not installed: {', '.join(missing)}; see tests/engines/install.sh"
        if os.environ.get("GGUF2ST_ENGINES"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
