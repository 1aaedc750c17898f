"""The tests of this directory need the engines that install.sh installs."""

import pytest

from tests.oracles.engines import need


@pytest.fixture(scope="session", autouse=True)
def engines() -> None:
    """Skip without the engines, unless GGUF2ST_ENGINES says that they have to be there."""
    need("vllm", "sglang", "transformers", "torchvision", "PIL")
