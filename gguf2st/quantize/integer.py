"""Integer codes with a scale, and maybe a zero point, for each group of columns of a row.

A value is (code - zero) * scale. Scales are rounded to the dtype in which they will be
stored before codes are chosen, so codes fit the scales that an engine will read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array, is_tensor
from gguf2st.buffers import Buffers
from gguf2st.gguf.blocks import PackedRows
from gguf2st.gguf.blocks.kernels.fused import decoder_of
from gguf2st.quantize import integer_kernels as kernels
from gguf2st.quantize.errors import ErrorSums, ScaleRangeError
from gguf2st.quantize.scale_formulas import DTYPES
from gguf2st.quantize.weights import check_values, group_weights, not_finite


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
        if self.bits not in (4, 8) or self.group_size < 0 or self.scale_dtype not in DTYPES:
            raise ValueError(f"there is no {self}")


@dataclass
class IntegerRows:
    """Quantized rows; a value is (code - zero) * scale.

    `codes` is uint8 (rows, columns), each below 2 ** bits. `scales` is float32 and
    `zeros` uint8, both (rows, groups). Scales are exact in the grid's `scale_dtype`;
    they can be negative where the grid is symmetric. Zeros are then all 2 ** (bits - 1).
    """

    codes: Array
    scales: Array
    zeros: Array
    errors: ErrorSums = field(default_factory=ErrorSums)


def quantize_rows(
    values: Array | PackedRows,
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
        values: float32 (rows, columns), finite; an array, or a tensor on any device. Of rows that
            are still packed, "rtn" decodes as many as a core's first cache holds at a time.
        grid: what a group can hold; its group size must divide the columns.
        importance: float32 (columns,), weights of squared errors, such as the mean square
            of what the column is multiplied with; None for equal weights. Where all
            weights of a group are 0, they count as equal in the search.
        fit: "search" or "rtn".
        by_square: in a search, multiply weights with the squares of the values. Without an
            importance this is the better guide for groups of more than 32 columns.

    Returns:
        Codes, scales and zero points (tensors where `values` is one), and sums of errors. The
        weighted sums use all weights.

    Raises:
        ValueError: a value isn't finite, or shapes don't fit.
        ScaleRangeError: a scale is too large for its dtype.
    """
    if fit not in ("search", "rtn"):
        raise ValueError(f"fit is {fit!r}, not 'search' or 'rtn'")
    group = grid.group_size or max(1, values.shape[-1])
    if isinstance(values, PackedRows) and (fit == "search" or not _can_stay_packed(values, group)):
        values = values.decode()
    check_values(values, group)
    by_square = by_square and fit == "search"
    factors = _NONE if fit == "rtn" else _factors(grid, by_square=by_square)
    if is_tensor(values):
        from gguf2st.quantize import device  # noqa: PLC0415

        return device.quantize_rows(values, grid, importance, factors, by_square=by_square)
    weights, units = group_weights(importance, values.shape[1], group)
    rows = _Rows.of(values, group)
    weighs = importance is not None or fit == "search"
    source = rows.values, rows.padded(weights, len(units)) if weighs else None, by_square, units
    height, width, groups = rows.height, rows.width, len(units)
    result = IntegerRows(
        np.empty((height, groups * width), np.uint8),
        np.empty((height, groups), np.float32),
        np.empty((height, groups), np.uint8),
    )
    sums = np.zeros(4)
    results = result.codes.ravel(), result.scales.ravel(), result.zeros.ravel(), sums
    options = np.float32(1 << (grid.bits - 1)), grid.symmetric, DTYPES[grid.scale_dtype]
    lines = _buffers.take("lines", (kernels.LINES_SIZE,), np.float32)
    if fit == "rtn":
        status = kernels.round_rows(rows.packed, source, width, *options, lines, results)
        sums[2:] = sums[2] if weighs else sums[0]
    else:
        names, size = ("tile", "weight tile"), width * kernels.LANES
        tiles = tuple(_buffers.take(name, (size,), np.float32) for name in names)
        status = kernels.fit_rows(source, *options, factors, tiles, lines, results)
    if status != kernels.FINISHED:
        raise _failure(status, values, grid, group)
    result.errors = ErrorSums(*sums.tolist())
    if height > len(values) or width > group:
        codes = result.codes.reshape(height, groups, width)[: len(values), :, :group]
        result.codes = np.ascontiguousarray(codes).reshape(values.shape)
        result.scales, result.zeros = result.scales[: len(values)], result.zeros[: len(values)]
    return result


_buffers = Buffers()

# The decoder, blocks, their bytes and their elements, where values are decoded already.
_NOT_PACKED = (0, np.zeros(0, np.uint8), 1, 1)
# So many values fit into a core's first cache beside their blocks and codes.
_CACHED_ELEMENTS = 1 << 12


@dataclass(frozen=True)
class _Rows:
    """Rows as kernels take them: sixteen rows and columns at a time.

    `values` is float32 (height * groups * width,), or memory for some of them where they are still
    `packed`: the decoder, blocks, their bytes and their elements. Rows and columns that
    fill up are zeros, which add nothing to a group but zeros.
    """

    values: npt.NDArray[np.float32]
    height: int
    width: int
    packed: tuple[int, npt.NDArray[np.uint8], int, int] = _NOT_PACKED

    @classmethod
    def of(cls, values: Array | PackedRows, group: int) -> _Rows:
        if not isinstance(values, PackedRows):
            tall, wide = -len(values) % kernels.LANES, -group % kernels.LANES
            parts = values.reshape(len(values), -1, group)
            if tall or wide:
                parts = np.pad(parts, ((0, tall), (0, 0), (0, wide)))
            return cls(np.ascontiguousarray(parts).ravel(), len(parts), group + wide)
        kind, unit = values.kind, kernels.LANES * group
        size = max(1, _CACHED_ELEMENTS // unit) * unit
        packed = decoder_of(kind.name), values.raw.ravel(), kind.block_bytes, kind.block_size
        return cls(_buffers.take("strip", (size,), np.float32), len(values), group, packed)

    def padded(self, weights: npt.NDArray[np.float32], groups: int) -> npt.NDArray[np.float32]:
        """Weights (columns,) of the columns of so many groups, and of those that fill them up."""
        parts = weights.reshape(groups, -1)
        wide = self.width - parts.shape[1]
        return np.pad(parts, ((0, 0), (0, wide)), mode="edge").ravel() if wide else weights


def _failure(status: int, values: Array | PackedRows, grid: IntegerGrid, group: int) -> ValueError:
    """Why a kernel didn't finish."""
    if isinstance(values, PackedRows):
        values = values.decode()
    if status == kernels.NOT_FINITE:
        return not_finite(values)
    return ScaleRangeError(_largest_scale(values, grid, group), grid.scale_dtype)


def _can_stay_packed(rows: PackedRows, group: int) -> bool:
    """Whether a kernel can decode rows as it goes: sixteen groups at a time, and whole blocks."""
    groups = rows.shape[0] * rows.shape[1] // group
    return rows.has_kernel and not group % kernels.LANES and not groups % kernels.LANES


def dequantize_rows(rows: IntegerRows, grid: IntegerGrid) -> Array:
    """The values of quantized rows, float32 (rows, columns), rounded once where need be."""
    if is_tensor(rows.codes):
        from gguf2st.quantize import device  # noqa: PLC0415

        return device.dequantize_rows(rows)
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


def _largest_scale(values: Array, grid: IntegerGrid, group: int) -> float:
    parts = values.reshape(-1, group).astype(np.float64)
    low, high = parts.min(axis=1).clip(max=0), parts.max(axis=1).clip(min=0)
    spread = 2 * np.maximum(-low, high) if grid.symmetric else high - low
    return float(spread.max() / ((1 << grid.bits) - 1))
