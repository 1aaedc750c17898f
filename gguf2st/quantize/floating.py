"""Small floating-point codes: E4M3 under scales of rows or blocks, E2M1 under 8-bit scales.

E4M3 ("fp8", torch's float8_e4m3fn) has a sign, 4 bits of exponent and 3 of mantissa, no
infinities, and 448 as its largest number. E2M1 ("fp4") knows 0, .5, 1, 1.5, 2, 3, 4 and 6
with either sign. Scales are rounded to the dtype in which they are stored before codes are
chosen. Plain rounding ("rtn") gives the bytes of compressed-tensors' compressors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array, is_tensor
from gguf2st.buffers import Buffers
from gguf2st.quantize import floating_kernels as kernels
from gguf2st.quantize.errors import ErrorSums, ScaleRangeError
from gguf2st.quantize.scale_formulas import DTYPES
from gguf2st.quantize.weights import check_values, group_weights, not_finite

Values = npt.NDArray[np.float32]

BLOCK = 128
MXFP4_GROUP = 32
NVFP4_GROUP = 16
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
_buffers = Buffers()


@dataclass
class Fp8Rows:
    """Rows of E4M3; a value is code * scale.

    `codes` is uint8 (rows, columns), the bytes of float8_e4m3fn. `scales` is float32
    (rows, 1), or (ceil(rows / 128), ceil(columns / 128)) of blocks.
    """

    codes: Array
    scales: Array
    errors: ErrorSums = field(default_factory=ErrorSums)


@dataclass
class Fp4Rows:
    """Rows of E2M1, not packed yet (see `packing.pack_nibbles`).

    `codes` is uint8 (rows, columns), each below 16. `scales` is uint8 (rows, groups): of
    MXFP4 E8M0, where byte b stands for 2 ** (b - 127); of NVFP4 the bytes of
    float8_e4m3fn, which are divided by the global scale.
    """

    codes: Array
    scales: Array
    errors: ErrorSums = field(default_factory=ErrorSums)


def quantize_fp8_rows(
    values: Array,
    scale_dtype: str = "F32",
    importance: Values | None = None,
    fit: str = "rtn",
) -> Fp8Rows:
    """Quantize to E4M3 with a scale for each row: largest magnitude / 448.

    A row of zeros gets scale 1. Where the scale would become zero it becomes the smallest
    number of its dtype.

    Args:
        values: float32 (rows, columns), finite; an array, or a tensor on any device.
        scale_dtype: "F32", "F16" or "BF16".
        importance: float32 (columns,), weights of squared errors in the sums.
        fit: without effect. The steps of E4M3 grow with its numbers, so another scale
            wouldn't bring them nearer.

    Raises:
        ValueError: a value isn't finite, or shapes don't fit.
        ScaleRangeError: a scale is too large for its dtype.
    """
    check_values(values, 1)
    if is_tensor(values):
        from gguf2st.quantize import device  # noqa: PLC0415

        return device.quantize_fp8_rows(values, scale_dtype, importance)
    return _fp8(values, None, scale_dtype, importance)


def quantize_fp8_blocks(
    values: Array, importance: Values | None = None, fit: str = "rtn"
) -> Fp8Rows:
    """Quantize to E4M3 with a float32 scale for each block of 128x128.

    Like `quantize_fp8_rows`. Blocks at the ends may be incomplete; rows have to come in
    multiples of 128, but for the last ones of a matrix.
    """
    check_values(values, 1)
    if is_tensor(values):
        from gguf2st.quantize import device  # noqa: PLC0415

        return device.quantize_fp8_blocks(values, importance)
    return _fp8(values, BLOCK, "F32", importance)


def _fp8(values: Values, size: int | None, dtype: str, importance: Values | None) -> Fp8Rows:
    """Quantize blocks of `size` rows and columns, or rows."""
    if dtype not in DTYPES:
        raise ValueError(f"scales can't be stored as {dtype}")
    rows, columns = values.shape
    weights, unit = group_weights(importance, columns, columns)
    padded, weights = _padded(values, weights, 1, kernels.STRIP)
    block = (size, size) if size else (1, padded.shape[1])
    codes = np.empty(padded.shape, np.uint8)
    scales = np.empty((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    partial = _buffers.take("partial", (3 * kernels.STRIP,), np.float32)
    sums = np.zeros(3)
    status = kernels.encode_e4m3(
        padded.ravel(), weights, block, DTYPES[dtype], partial, codes.ravel(), scales, sums
    )
    _check(status, values, dtype)
    weighted = float(sums[2] * unit[0])
    errors = ErrorSums(float(sums[0]), float(sums[1]), weighted, weighted)
    return Fp8Rows(np.ascontiguousarray(codes[:, :columns]), scales, errors)


def _padded(values: Values, weights: Values, rows: int, columns: int) -> tuple[Values, Values]:
    """Values and weights with zeros up to multiples of so many rows and columns."""
    tall, wide = -values.shape[0] % rows, -values.shape[1] % columns
    if tall or wide:
        return np.pad(values, ((0, tall), (0, wide))), np.pad(weights, (0, wide))
    return np.ascontiguousarray(values), weights


def _check(status: int, values: Values, dtype: str) -> None:
    """Raise what a kernel has found."""
    if status != kernels.FINISHED and not np.isfinite(values).all():
        raise not_finite(values)
    if status == kernels.OVERFLOW:
        raise ScaleRangeError(float(abs(values).max() / LARGEST_E4M3), dtype)


def quantize_mxfp4(values: Array, importance: Values | None = None, fit: str = "search") -> Fp4Rows:
    """Quantize to E2M1 with a power of two for each 32 columns of a row.

    "rtn" takes the power of two that lets the largest magnitude fall from 3.5 to 7;
    "search" also tries the two beside it and takes the one with the least weighted squared
    error. A group of zeros gets the smallest scale.

    Args:
        values: float32 (rows, columns), finite; 32 divides columns; an array, or a tensor.
        importance: float32 (columns,), weights of squared errors.
        fit: "search" or "rtn".

    Raises:
        ValueError: a value isn't finite, or shapes don't fit.
    """
    steps = _steps(fit, -1, 1)
    check_values(values, MXFP4_GROUP)
    if is_tensor(values):
        from gguf2st.quantize import device  # noqa: PLC0415

        return device.quantize_mxfp4(values, importance, steps)
    return _fp4(values, importance, 0.0, MXFP4_GROUP, steps)


def nvfp4_global_scale(maximum: float) -> float:
    """The global scale of NVFP4 for a largest magnitude: 448 * 6 / maximum, in float32.

    Matrices that an engine joins need the same: give the maximum of all. 1 where the
    maximum is 0 or too small (`generate_gparam` of compressed-tensors).
    """
    with np.errstate(over="ignore"):
        # A product with the reciprocal, since torch divides a number by a tensor so.
        scale = np.float32(1) / max(np.float32(maximum), np.finfo(np.float32).tiny)
        scale *= np.float32(448 * 6)
    return float(scale) if np.isfinite(scale) else 1.0


def nvfp4_global_scale_of(factor: float) -> float:
    """The global scale that stands for a factor of NVFP4 blocks of a GGUF: its reciprocal.

    Readers divide by it, in two ways: engines take the reciprocal again, compressed-tensors
    divides block scales. Of the reciprocal and its neighbours in float32 this is one that gives
    engines the factor back, where there is one, and of those the one that lets compressed-tensors
    decode most values to what they are.
    """
    wanted = np.float32(factor)
    middle = np.float32(1) / wanted
    near = [np.nextafter(middle, np.float32(end), dtype=np.float32) for end in (0, np.inf)]
    scales, codes = E4M3[:127, None], E2M1
    values = codes * scales * wanted

    def merit(divisor: np.float32) -> tuple[float, int]:
        same = (scales / divisor * codes == values).sum()
        return (-abs(float(np.float32(1) / divisor - wanted)), int(same))

    return float(max([middle, *near], key=merit))


def nvfp4_block_errors(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], factor: float, global_scale: float
) -> ErrorSums:
    """What blocks of a GGUF lose whose values are code * scale * factor: 0 where 1 / factor is exact.

    Args:
        codes: uint8 (rows, columns), E2M1.
        scales: uint8 (rows, columns / 16), E4M3 without sign.
        factor: what the GGUF multiplies with.
        global_scale: what engines multiply with the reciprocal of.
    """
    products = E4M3[:127, None] * E2M1
    wanted = products * np.float32(factor)
    found = products * (np.float32(1) / np.float32(global_scale))
    pairs = scales.astype(np.intp).repeat(NVFP4_GROUP, axis=1) * len(E2M1) + (codes & 7)
    counts = np.bincount(pairs.ravel(), minlength=wanted.size).reshape(wanted.shape)
    squared = float((np.square(found - wanted, dtype=np.float64) * counts).sum())
    norm = float((np.square(wanted, dtype=np.float64) * counts).sum())
    changes = np.abs(found - wanted) / np.where(wanted, np.abs(wanted), 1)
    return ErrorSums(squared, norm, squared, squared, float(changes[counts > 0].max(initial=0)))


def quantize_nvfp4(
    values: Array,
    global_scale: float,
    importance: Values | None = None,
    fit: str = "search",
) -> Fp4Rows:
    """Quantize to E2M1 with an E4M3 scale for each 16 columns of a row.

    "rtn" lets the largest magnitude of a group fall to 6; "search" also tries scales down
    to 3 E4M3 steps smaller and up to 5 larger (where it falls to 4, which has nearer
    neighbours) and takes the one with the least weighted squared error. A group of zeros,
    or one whose scale would be zero, gets scale 1/8, as in compressed-tensors.

    Args:
        values: float32 (rows, columns), finite; 16 divides columns; an array, or a tensor.
        global_scale: see `nvfp4_global_scale`.
        importance: float32 (columns,), weights of squared errors.
        fit: "search" or "rtn".

    Raises:
        ValueError: a value isn't finite, or shapes don't fit.
    """
    divisor = np.float32(global_scale)
    if not (divisor > 0 and np.isfinite(divisor)):
        raise ValueError(f"the global scale is {global_scale}, not a positive number")
    steps = _steps(fit, -3, 5)
    check_values(values, NVFP4_GROUP)
    if is_tensor(values):
        from gguf2st.quantize import device  # noqa: PLC0415

        return device.quantize_nvfp4(values, float(divisor), importance, steps)
    return _fp4(values, importance, float(divisor), NVFP4_GROUP, steps)


def _e4m3_values() -> Values:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    sizes = np.where(
        exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6)
    )
    sizes[exponent * 8 + mantissa == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


E4M3: Values = _e4m3_values()
"""The value of each code of E4M3; 127 and 255 are NaN."""

E2M1: Values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""The value of each code of E2M1 below 8; with 8 added it is negative."""

E8M0: Values = np.ldexp(1.0, np.arange(255) - 127).astype(np.float32)
"""The value of each code of E8M0 but 255, which is NaN."""


def _steps(fit: str, first: int, last: int) -> npt.NDArray[np.int64]:
    """How far from plain rounding's scale code others are tried; 0 comes first."""
    if fit not in ("search", "rtn"):
        raise ValueError(f"fit is {fit!r}, not 'search' or 'rtn'")
    steps = range(first, last + 1) if fit == "search" else ()
    return np.array([0, *(step for step in steps if step)], np.int64)


def _fp4(
    values: Values,
    importance: Values | None,
    global_scale: float,
    group: int,
    steps: npt.NDArray[np.int64],
) -> Fp4Rows:
    """Encode with the best of the scales beside plain rounding's; E8M0 have 0 as a global scale."""
    rows, columns = values.shape
    weights, units = group_weights(importance, columns, group)
    padded, weights = _padded(values, weights, kernels.LANES, group)
    codes = np.empty(padded.shape, np.uint8)
    scales = np.empty((rows, columns // group), np.uint8)
    sums = np.zeros(4)
    status = kernels.fit_e2m1(
        padded.ravel(),
        weights,
        units,
        np.float32(global_scale),
        steps,
        _tiles(),
        codes.ravel(),
        scales,
        sums,
    )
    _check(status, values, "")
    return Fp4Rows(codes[:rows], scales, ErrorSums(*sums.tolist()))


def _tiles() -> tuple[npt.NDArray[Any], ...]:
    """What a kernel works in: two arrays of float32 and two of uint8."""
    names = {"values": np.float32, "sizes": np.float32, "codes": np.uint8, "rows": np.uint8}
    shape = (kernels.STRIP * kernels.LANES,)
    return tuple(_buffers.take(name, shape, dtype) for name, dtype in names.items())
