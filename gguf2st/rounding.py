"""float32 values rounded to 16 bits, once, to nearest with ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Halves = npt.NDArray[np.uint16] | npt.NDArray[np.float16]
DTYPES: dict[str, npt.DTypeLike] = {"BF16": "<u2", "F16": "<f2"}


def round_values(values: npt.NDArray[np.float32], dtype: str, out: Halves) -> int:
    """Round float32 values into an array that the caller has.

    Args:
        values: float32, contiguous.
        dtype: "BF16" or "F16".
        out: of the same size and contiguous; uint16 for BF16, which numpy hasn't, else float16.

    Returns:
        How many of the results aren't finite. Beyond the largest number of the dtype
        lies infinity; NaN stays NaN.
    """
    from gguf2st import rounding_kernels as kernels  # noqa: PLC0415  # importing numba takes a while

    kernel = kernels.bfloat16 if dtype == "BF16" else kernels.float16
    flat, target = values.reshape(-1), out.reshape(-1).view(np.uint16)
    whole = flat.size // kernels.LANES * kernels.LANES
    count = int(kernel(flat[:whole], target[:whole]))
    if whole < flat.size:
        rest, rounded = np.zeros(kernels.LANES, np.float32), np.empty(kernels.LANES, np.uint16)
        rest[: flat.size - whole] = flat[whole:]
        count += int(kernel(rest, rounded))
        target[whole:] = rounded[: flat.size - whole]
    return count


def rounded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """The same in a new array of the same shape."""
    out = np.empty(values.shape, DTYPES[dtype])
    round_values(np.ascontiguousarray(values), dtype, out)
    return out


def count_not_finite(values: npt.NDArray[np.float32]) -> int:
    """How many values are infinite or not a number."""
    from gguf2st import rounding_kernels as kernels  # noqa: PLC0415  # importing numba takes a while

    flat = np.ascontiguousarray(values).reshape(-1)
    whole = flat.size // kernels.LANES * kernels.LANES
    rest = flat.size - whole - int(np.isfinite(flat[whole:]).sum())
    return int(kernels.not_finite(flat[:whole])) + rest
