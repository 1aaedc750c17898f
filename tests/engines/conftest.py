"""The tests of this directory need the engines that install.sh installs."""

import os
from importlib.util import find_spec

import pytest

NEEDED = ("vllm", "transformers", "torchvision", "PIL")


@pytest.fixture(scope="session", autouse=True)
def engines() -> None:
    """Skip without the engines, unless GGUF2ST_ENGINES says that they have to be there."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return
    message = f"not installed: {', '.join(missing)}; see tests/engines/install.sh"
    if os.environ.get("GGUF2ST_ENGINES"):
        pytest.fail(message)
    pytest.skip(message)
