"""The checkpoints that the fixtures were made from, recomputed by fixtures/weights.py."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _load(name: str) -> ModuleType:
    """Import a script's module by its path: fixtures/ is no package, and not on the path."""
    spec = importlib.util.spec_from_file_location(f"fixtures_{name}", FIXTURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_weights = _load("weights")
original_state_dict = _weights.original_state_dict  # (fixture folder) -> name -> tensor
original_tensor = _weights.original_tensor
write_checkpoint = _weights.write_checkpoint  # (fixture folder, target): a loadable checkpoint
