"""Integer codes with a scale, and maybe a zero point, for each group of columns of a row.

A value is (code - zero) * scale. Scales are rounded to the dtype in which they will be
stored before codes are chosen, so codes fit the scales that an engine will read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gguf2st.quantize import integer_kernels as kernels
from gguf2st.quantize import lanes
from gguf2st.quantize.errors import ErrorSums, ScaleRangeError
from gguf2st.quantize.weights import check_values, group_weights, not_finite

_DTYPES = {"F32": kernels.F32, "F16": kernels.F16, "BF16": kernels.BF16}


@dataclass(frozen=True)
class IntegerGrid:
    """The values that a group can take.

    `bits` is 4 or 8. `group_size` columns share a scale, 0 means the whole row.
    Without `symmetric` they share a zero point too. `scale_dtype` is safetensors' name,
    "F16", "BF16" or "F32".
    """

    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: str

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group_size < 0 or self.scale_dtype not in _DTYPES:
            raise ValueError(f"there is no {self}")


@dataclass
class IntegerRows:
    """Quantized rows; a value is (code - zero) * scale.

    `codes` is uint8 (rows, columns), each below 2 ** bits. `scales` is float32 and
    `zeros` uint8, both (rows, groups). Scales are exact in the grid's `scale_dtype`;
    they can be negative where the grid is symmetric. Zeros are then all 2 ** (bits - 1).
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.uint8]
    errors: ErrorSums = field(default_factory=ErrorSums)


def quantize_rows(
    values: npt.NDArray[np.float32],
    grid: IntegerGrid,
    importance: npt.NDArray[np.float32] | None = None,
    fit: str = "search",
    *,
    by_square: bool = False,
) -> IntegerRows:
    """Quantize rows, each for itself: cutting a matrix into chunks changes nothing.

    "rtn" rounds to nearest between the extremes of a group: scale, zero point and codes
    are bit for bit those of compressed-tensors' `calculate_qparams` and `quantize`.
    "search" tries scales and zero points, refines the best one's scale by least squares,
    and keeps it where it makes the group's weighted squared error less than "rtn" does.
    Its symmetric scales may be negative (codes reach -8 but not 8), so values that lie on
    such a grid already, like those of Q4_0, Q5_0 and Q8_0, come back as they were if the
    scale is exact in its dtype (as the scales of these types are in F16).

    A group of zeros gets scale 1 and codes that equal the zero point. A scale below the
    smallest number of its dtype becomes that number.

    Args:
        values: float32 (rows, columns), finite.
        grid: what a group can hold; its group size must divide the columns.
        importance: float32 (columns,), weights of squared errors, such as the mean square
            of what the column is multiplied with; None for equal weights. Where all
            weights of a group are 0, they count as equal in the search.
        fit: "search" or "rtn".
        by_square: multiply weights with the squares of the values. Without an importance
            this is the better guide for groups of more than 32 columns.

    Returns:
        Codes, scales, zero points and sums of errors. The weighted sums use all weights.

    Raises:
        ValueError: a value isn't finite, or shapes don't fit.
        ScaleRangeError: a scale is too large for its dtype.
    """
    if fit not in ("search", "rtn"):
        raise ValueError(f"fit is {fit!r}, not 'search' or 'rtn'")
    group = grid.group_size or max(1, values.shape[-1])
    check_values(values, group)
    rows, columns = values.shape
    result = IntegerRows(
        np.empty((rows, columns), np.uint8),
        np.empty((rows, columns // group), np.float32),
        np.empty((rows, columns // group), np.uint8),
    )
    weights, units = group_weights(importance, columns, group)
    sums = np.zeros((4, lanes.LANES))
    status = kernels.fit_rows(
        (np.ascontiguousarray(values), weights.repeat(lanes.LANES), by_square),
        units,
        np.float32(1 << (grid.bits - 1)),
        grid.symmetric,
        _DTYPES[grid.scale_dtype],
        _NONE if fit == "rtn" else _factors(grid, by_square=by_square),
        lanes.scratch(kernels.STATE_SIZE),
        result.codes,
        result.scales,
        result.zeros,
        sums,
    )
    if status == kernels.NOT_FINITE:
        raise not_finite(values)
    if status == kernels.OVERFLOW:
        raise ScaleRangeError(_largest_scale(values, grid, group), grid.scale_dtype)
    if fit == "rtn":
        sums[3] = sums[2]
    result.errors = ErrorSums(*sums.sum(axis=1).tolist())
    return result


def dequantize_rows(rows: IntegerRows, grid: IntegerGrid) -> npt.NDArray[np.float32]:
    """The values of quantized rows, float32 (rows, columns), rounded once where need be."""
    count, columns = rows.codes.shape
    group = grid.group_size or columns
    codes = rows.codes.reshape(count, -1, group).astype(np.float32)
    codes -= rows.zeros[:, :, None]
    codes *= rows.scales[:, :, None]
    return codes.reshape(count, columns)


# Candidates of the search, as multiples of plain rounding's scale; each stands for two windows
# of codes. Since least squares follows, steps can be coarse: three times as many make the error
# of real weights 0.2 % less. The range has to be wide: below 1 clips what matters little, and
# above 1, groups that come from a grid with a fractional minimum (Q4_K, Q4_1) find theirs. 0 is
# the largest magnitude / half (see `kernels.propose`).
_NONE = np.zeros(0, np.float32)
_FACTORS = {
    (4, False): np.append(np.linspace(0.66, 1.3, 13), 0).astype(np.float32),
    (4, True): np.append(np.linspace(0.62, 1.25, 13), 0).astype(np.float32),
    (8, False): np.array([0.97, 0.985, 0], np.float32),
    # 127.5 / 127 takes the largest magnitude to 127, as Q8_0 does.
    (8, True): np.array([0.97, 0.985, 127.5 / 127, 0], np.float32),
}


# Weighted by squares, an error that candidates above this make smaller makes the model worse:
# KL 0.21 and 1.00 instead of 0.19 and 0.93 (SmolLM2, Gemma 3 270M; benchmarks/quality.py).
_BY_SQUARE = np.array([0.70, 0.75, 0.80, 0.84, 0.88, 0.91, 0.94, 0.97, 1.0, 1.03], np.float32)


def _factors(grid: IntegerGrid, *, by_square: bool) -> npt.NDArray[np.float32]:
    if by_square and grid.bits == 4 and not grid.symmetric:
        return _BY_SQUARE
    return _FACTORS[grid.bits, grid.symmetric]


def _largest_scale(values: npt.NDArray[np.float32], grid: IntegerGrid, group: int) -> float:
    parts = values.reshape(-1, group).astype(np.float64)
    low, high = parts.min(axis=1).clip(max=0), parts.max(axis=1).clip(min=0)
    spread = 2 * np.maximum(-low, high) if grid.symmetric else high - low
    return float(spread.max() / ((1 << grid.bits) - 1))
