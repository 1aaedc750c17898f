"""Integer codes with a scale, and maybe a zero point, for each group of columns of a row.

The steps and their names are those of `integer_kernels`, whose comments say why. Values are
(rows, groups, columns of a group), and what belongs to a group is (rows, groups). Groups are
multiplied with a power of two, `unit`, such that their largest magnitude lies from 1 to 2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gguf2st.quantize.device.arithmetic import (
    SCALE_DTYPES,
    divided,
    kernel_beside,
    rounded_scales,
    spread,
)
from gguf2st.quantize.errors import MARGIN, ErrorSums, ScaleRangeError
from gguf2st.quantize.integer import IntegerGrid, IntegerRows
from gguf2st.quantize.weights import group_weights, not_finite

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def quantize_rows(
    values: Tensor,
    grid: IntegerGrid,
    importance: npt.NDArray[np.float32] | None,
    factors: npt.NDArray[np.float32],
    *,
    by_square: bool,
) -> IntegerRows:
    """See `gguf2st.quantize.integer.quantize_rows`; without `factors` it rounds to nearest."""
    rows, columns = values.shape
    group = grid.group_size or columns
    weights, units = group_weights(importance, columns, group)
    source = (
        values.reshape(rows, -1, group),
        spread(weights, values).reshape(-1, group),
        by_square,
    )
    kernel = kernel_beside("integer_kernel", values)
    fit = _fit if kernel is None or group > kernel.WIDEST else functools.partial(_fit_by, kernel)
    codes, scales, zeros, totals = fit(source, spread(units, values), spread(factors, values), grid)
    *sums, broken, excess = totals.tolist()
    if broken:
        raise not_finite(values)
    if excess:
        raise ScaleRangeError(_largest_scale(source[0], grid), grid.scale_dtype)
    return IntegerRows(codes.reshape(rows, columns), scales, zeros, ErrorSums(*sums))


def dequantize_rows(rows: IntegerRows) -> Tensor:
    """See `gguf2st.quantize.integer.dequantize_rows`."""
    values: Tensor = rows.codes.reshape(*rows.scales.shape, -1).float()
    values -= rows.zeros[..., None]
    values *= rows.scales[..., None]
    return values.reshape(rows.codes.shape)


@dataclass(frozen=True)
class _Groups:
    """What is known of each group: its extremes and plain rounding's choice, in its own unit.

    `base` is plain rounding's scale before it was rounded itself; `finite` and `fits` are
    truth values.
    """

    half: float
    symmetric: bool
    dtype: str
    unit: Tensor
    low: Tensor
    high: Tensor
    base: Tensor
    scale: Tensor
    offset: Tensor
    finite: Tensor
    fits: Tensor


def _prepare(parts: Tensor, grid: IntegerGrid) -> _Groups:
    half, symmetric = float(1 << (grid.bits - 1)), grid.symmetric
    low, high = torch.aminmax(parts, dim=-1)
    low, high = low.clamp(max=0), high.clamp(min=0)
    magnitude = torch.maximum(-low, high)
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(-126, 126)
    unit = ((127 - exponent) << 23).view(torch.float32)
    zero = magnitude == 0
    levels = 2 * half - 1
    if symmetric:
        scale, offset = divided(magnitude, levels / 2), torch.zeros_like(low)
    else:
        scale = divided(high - low, levels)
        offset = _between(-half - low / scale, -half, half - 1).round()
        offset = torch.where(zero, 0, offset)
    base = torch.where(zero, unit, scale * unit)
    rounded = _rounded(base, unit, grid.scale_dtype)
    return _Groups(
        half=half,
        symmetric=symmetric,
        dtype=grid.scale_dtype,
        unit=unit,
        low=low * unit,
        high=high * unit,
        base=base,
        scale=rounded,
        offset=offset,
        finite=torch.isfinite(magnitude),
        fits=rounded <= SCALE_DTYPES[grid.scale_dtype][2] * unit,
    )


def _between(values: Tensor, lowest: float, highest: float) -> Tensor:
    """Values cut off at both ends; 0 / 0, of a group too small for a scale, is the lowest."""
    return torch.fmax(values, values.new_full((), lowest)).clamp(max=highest)


def _rounded(scale: Tensor, unit: Tensor, dtype: str) -> Tensor:
    """Scales as `dtype` can hold them once they are out of their group's unit."""
    return rounded_scales(scale / unit, dtype) * unit


Source = tuple[Tensor, Tensor, bool]
"""Values, weights (groups, columns), and whether these are multiplied with the values' squares."""

Fitted = tuple[Tensor, Tensor, Tensor, Tensor]
"""What `integer_kernel.fit` returns."""


def _fit_by(
    kernel: Any, source: Source, units: Tensor, factors: Tensor, grid: IntegerGrid
) -> Fitted:
    """Let a kernel do it."""
    values, weights, by_square = source
    fitted: Fitted = kernel.fit(
        values,
        weights,
        units,
        factors,
        SCALE_DTYPES[grid.scale_dtype],
        float(1 << (grid.bits - 1)),
        symmetric=grid.symmetric,
        by_square=by_square,
    )
    return fitted


def _fit(source: Source, units: Tensor, factors: Tensor, grid: IntegerGrid) -> Fitted:
    """The same with torch's own operations."""
    groups = _prepare(source[0], grid)
    unit = 1 / groups.unit.double() ** 2
    # Turns sums of the groups' own unit into the caller's.
    caller = unit * units * (unit if source[2] else 1)
    source, pick, nearest = _in_unit(source, groups), (groups.scale, groups.offset), None
    if len(factors):
        pick, nearest = _search(source, groups, factors)
    codes, squared, norm, weighted = _encode(source, pick, groups.half)
    nearest = weighted if nearest is None else nearest
    sums = [squared * unit, norm * unit, weighted * caller, nearest * caller]
    wrong = [~groups.finite, ~groups.fits]
    totals = torch.stack([part.double().sum() for part in (*sums, *wrong)])
    return codes, pick[0] / groups.unit, (pick[1] + groups.half).to(torch.uint8), totals


def _largest_scale(parts: Tensor, grid: IntegerGrid) -> float:
    low, high = torch.aminmax(parts.double(), dim=-1)
    low, high = low.clamp(max=0), high.clamp(min=0)
    extent = 2 * torch.maximum(-low, high) if grid.symmetric else high - low
    return float(extent.max()) / ((1 << grid.bits) - 1)


def _in_unit(source: Source, groups: _Groups) -> Source:
    """The values in their groups' unit, and the weights of their squared errors."""
    values, weights, by_square = source
    values = values * groups.unit[..., None]
    return values, weights * values * values if by_square else weights, False


def _propose(groups: Triple, factor: Tensor, half: float, symmetric: bool) -> Pair:
    """A candidate: its scale, and where the lower of its two windows of k begins."""
    low, high, base = groups
    largest = torch.maximum(-low, high) / half
    scale = torch.where(factor == 0, largest, base * factor)
    if symmetric:
        return scale, torch.full_like(scale, -half)
    steady = torch.where(factor == 0, largest, torch.maximum(scale, base))
    return scale, _between((low / steady).floor(), 1 - 2 * half, -1)


def _score(
    source: Source, groups: Triple, factor: Tensor, best: Triple, half: float, symmetric: bool
) -> Triple:
    """Score, scale and window of the best of the candidates before and one more."""
    values, weights, _ = source
    score, scale, window = best
    candidate, first = _propose(groups, factor, half, symmetric)
    nearest = (values * (1 / candidate)[..., None]).round()
    for step in (0, 1):
        start = (first + step)[..., None]
        k = torch.minimum(torch.maximum(nearest, start), start + (2 * half - 1))
        weighted = weights * k
        xk, kk = (weighted * values).sum(-1), (weighted * k).sum(-1)
        better = xk / kk * xk > score
        score = torch.where(better, xk / kk * xk, score)
        scale = torch.where(better, xk / kk, scale)
        window = torch.where(better, first + step, window)
    return score, scale, window


def _attempt(source: Source, scale: Tensor, offset: Tensor, half: float) -> Triple:
    """Sum x * k, k * k and the squared error (all weighted) of encoding so."""
    values, weights, _ = source
    code = values / scale[..., None] + offset[..., None]
    k = code.clamp(-half, half - 1).round() - offset[..., None]
    error = values - k * scale[..., None]
    weighted = weights * k
    return (weighted * values).sum(-1), (weighted * k).sum(-1), (weights * error * error).sum(-1)


def _encode(source: Source, pick: Pair, half: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, uint8, and sums of squared errors, of squares and of weighted squared errors."""
    (values, weights, _), (scale, offset) = source, pick
    code = values / scale[..., None] + offset[..., None]
    code = code.clamp(-half, half - 1).round()
    error = (values - (code - offset[..., None]) * scale[..., None]).square()
    weighted = (weights * error).sum(-1)
    codes = (code + half).to(torch.uint8)
    return codes, error.sum(-1), values.square().sum(-1), weighted


def _search(source: Source, groups: _Groups, factors: Tensor) -> tuple[Pair, Tensor]:
    """The best scale and offset of each group, and plain rounding's weighted error."""
    half, symmetric = groups.half, groups.symmetric
    extent = groups.low, groups.high, groups.base
    pick = groups.scale, groups.offset
    xk, kk, nearest = _attempt(source, *pick, half)
    error, refined = nearest * MARGIN, _refined(xk, kk, *pick, half)

    def attempt(scale: Tensor, window: Tensor) -> None:
        nonlocal pick, error, refined
        tried = _settle(scale, window, groups)
        xk, kk, found = _attempt(source, *tried, half)
        better = found < error
        error = torch.where(better, found, error)
        refined = _where(better, _refined(xk, kk, *tried, half), refined)
        pick = _where(better, tried, pick)

    if half > 8:
        for factor in factors:
            scale, first = _propose(extent, factor, half, symmetric)
            for step in (0, 1) if symmetric else (0,):
                attempt(scale, first + step)
    else:
        zeros = torch.zeros_like(groups.base)
        best = zeros, zeros + 1, zeros - half
        for factor in factors:
            best = _score(source, extent, factor, best, half, symmetric)
        attempt(*best[1:])
    attempt(*refined)
    return pick, nearest


def _refined(xk: Tensor, kk: Tensor, scale: Tensor, offset: Tensor, half: float) -> Pair:
    """Least squares: the best scale for codes, and their window."""
    best = torch.where(kk > 0, xk / kk, scale)
    return best.abs(), -half - offset + (best < 0)


def _settle(scale: Tensor, window: Tensor, groups: _Groups) -> Pair:
    """A candidate's scale, rounded to its dtype, and offset; plain rounding's where it is too large."""
    half = groups.half
    if groups.symmetric:
        # The window from -half + 1 to half is the symmetric one with a negative scale.
        scale, offset = torch.where(window != -half, -scale, scale), torch.zeros_like(scale)
    else:
        offset = -half - window
    scale = _rounded(scale, groups.unit, groups.dtype)
    fits = scale.abs() <= SCALE_DTYPES[groups.dtype][2] * groups.unit
    return _where(fits, (scale, offset), (groups.scale, groups.offset))


def _where(condition: Tensor, first: Pair, second: Pair) -> Pair:
    return torch.where(condition, first[0], second[0]), torch.where(condition, first[1], second[1])
