"""Files of static activation scales: what a calibration run leaves for formats that need them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from gguf2st.errors import InputError

# The leaf of such a tensor in checkpoints (llm-compressor's, modelopt's, SGLang's).
LEAF = ".input_scale"


def read_activation_scales(path: str | os.PathLike[str]) -> dict[str, float]:
    """Scales by module name, from `{"model.layers.0.mlp.experts.0.up_proj": 0.02, ...}` or safetensors.

    Names may end with `.input_scale`; of a safetensors file, which may be a whole
    checkpoint's shard, only tensors with that end are read. Raises `InputError` for a
    file that is neither, holds none, or has one that isn't a positive number.
    """
    file = Path(path)
    found = dict(_tensors(file) if file.suffix == ".safetensors" else _entries(file))
    if not found:
        raise InputError(
            f"{file} holds no activation scales; give tensors or entries named MODULE{LEAF}."
        )
    for name, scale in found.items():
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(
                f"the activation scale of {name} in {file} is {scale}, not a positive number; "
                "calibrate again."
            )
    return {name.removesuffix(LEAF): scale for name, scale in found.items()}


def _entries(file: Path) -> Iterable[tuple[str, float]]:
    try:
        document = json.loads(file.read_text("utf-8"))
        return [(str(name), float(scale)) for name, scale in document.items()]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} can't be read as a JSON object of numbers ({error}); give one, or safetensors."
        ) from error


def _tensors(file: Path) -> Iterable[tuple[str, float]]:
    try:
        with safe_open(file, framework="np") as shard:
            names = [name for name in shard.keys() if name.endswith(LEAF)]  # noqa: SIM118
            # One expert's gate and up may share a measured range; engines take the largest.
            return [(name, float(np.max(shard.get_tensor(name)))) for name in names]
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} can't be read as safetensors ({error}).") from error
