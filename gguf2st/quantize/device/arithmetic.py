"""What keeps arithmetic on a GPU equal to that of the CPU, to the last bit."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gguf2st.quantize.errors import ErrorSums, ScaleRangeError
from gguf2st.quantize.weights import not_finite

# Dtype of scales -> torch's, the smallest number, the largest.
SCALE_DTYPES = {
    "F32": (torch.float32, 2.0**-149, 3.4028234663852886e38),
    "F16": (torch.float16, 2.0**-24, 65504.0),
    "BF16": (torch.bfloat16, 2.0**-133, 3.3895313892515355e38),
}


def divided(values: Tensor, divisor: float) -> Tensor:
    """Values / divisor, rounded once.

    On a GPU, torch would multiply with the reciprocal of a plain number, which rounds twice.
    """
    return values / values.new_full((), divisor)


def rounded_scales(scales: Tensor, dtype: str) -> Tensor:
    """Scales as their dtype can hold them, in float32; 0 becomes its smallest number.

    What is too large becomes infinite.
    """
    kind, smallest, _ = SCALE_DTYPES[dtype]
    rounded = scales.to(kind).float()
    return torch.where(rounded == 0, smallest, rounded)


def kernel_beside(name: str, tensor: Tensor) -> Any:
    """The module of a kernel where this tensor's device has a compiler for it, else None.

    What does without the kernel gives the same.
    """
    if not tensor.is_cuda or find_spec("triton") is None:
        return None
    return import_module(f"gguf2st.quantize.device.{name}")


def spread(importance: npt.NDArray[np.generic], values: Tensor) -> Tensor:
    """An array of the host on the device of `values`."""
    return torch.from_numpy(importance).to(values.device)


def checked_sums(
    values: Tensor,
    sums: list[Tensor],
    finite: Tensor,
    fits: Tensor,
    dtype: str,
    largest_scale: Tensor,
) -> ErrorSums:
    """Sums of errors, in the order of `ErrorSums`, or what is wrong with the values.

    All comes from the device at once, since that waits for everything before.

    Args:
        values: what was quantized.
        sums: four numbers, float64.
        finite: whether all values are.
        fits: whether the scales' `dtype` can hold all scales.
        dtype: safetensors' name.
        largest_scale: the largest of all, before it was rounded.
    """
    numbers = [*sums, finite.double(), fits.double(), largest_scale.double()]
    *errors, is_finite, does_fit, largest = torch.stack(numbers).tolist()
    if not is_finite:
        raise not_finite(values)
    if not does_fit:
        raise ScaleRangeError(largest, dtype)
    return ErrorSums(*errors)
