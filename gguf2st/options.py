"""What a user can decide about a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf2st.targets import TargetOptions

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class PlanOptions:
    """What a user can decide about a plan.

    `keep` and `quantize` are regular expressions searched in module names. `engines`
    must load the result at each of the `tensor_parallel` sizes, on cards of
    `compute_capability` (75 for an RTX 20xx; None: 80 or above); None stands for all
    engines that take the format at all. `importance` maps GGUF tensors to the weights
    of their columns, `activation_scales` modules to the static scale of what they multiply.

    `quality` (0 to 3) or `bits_per_weight` choose bits and group sizes instead of `target`, by what
    was measured to gain most for each byte: a level, or the most exact plan whose whole output has
    at most so many bits for each weight of the model.

    With `importance`, integer formats scale activations into weights by the power
    `smoothing` (0 to 1) of their size; 0 leaves that out. None is the exponent that works best
    with 4 bits, and none where scaling loses: for 8 bits, and what lies on the format's grid.
    Given with an unquantized format, the result is made ready for another quantizer.

    `device` is "cpu", "cuda" or "cuda:1": where rows are decoded and quantized.
    `threads` is how many workers there may be; fewer are taken where more would need more than
    `max_memory` bytes in all.
    """

    to: str = "bf16"
    target: TargetOptions = field(default_factory=TargetOptions)
    engines: tuple[str, ...] | None = None
    tensor_parallel: tuple[int, ...] = (1,)
    compute_capability: int | None = None
    keep: tuple[str, ...] = ()
    quantize: tuple[str, ...] = ()
    quality: int | None = None
    bits_per_weight: float | None = None
    fit: str = "search"
    importance: Mapping[str, npt.NDArray[np.float32]] | None = None
    smoothing: float | None = None
    activation_scales: Mapping[str, float] | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    tokenizer_from: Path | None = None
    config_from: Path | None = None
    mapping_directory: Path | None = None
    threads: int = 1
    device: str = "cpu"
    max_memory: int | None = None
