"""Rounding and search of `integer` in one kernel for GPUs: a group is read once and stays in registers.

What torch's own operations read and write about 400 times for each value takes a small part
of the time so. The steps are those of `integer`, with the same names.
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from gguf2st.quantize.errors import MARGIN as _MARGIN

# The widest group that fits into the registers of one program.
WIDEST = 1 << 15
# Values of a program (several narrow groups at once), and of a warp.
TILE = 2048
WARP_VALUES = 512

LAUNCHING = threading.Lock()

MARGIN = tl.constexpr(_MARGIN)
# Added and taken off again, it rounds to an integer, ties to even.
ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def rint(values):
    """Values rounded to integers, ties to even."""
    return (values + ROUNDER) - ROUNDER


@triton.jit
def _coded(values, scale, offset, half: tl.constexpr):
    """Signed codes of values."""
    code = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)) + offset[:, None]
    return rint(tl.minimum(tl.maximum(code, -half), half - 1.0))


@triton.jit
def _attempt(values, weights, tried, picked, half: tl.constexpr):
    """Measure a scale and an offset; they become the pick where their error is less.

    A pick is a scale, an offset, the weighted error, and the scale and window that least
    squares would take for its codes.
    """
    scale, offset = tried
    pick_scale, pick_offset, pick_error, pick_refined, pick_window = picked
    k = _coded(values, scale, offset, half) - offset[:, None]
    error = values - k * scale[:, None]
    weighted = weights * k
    xk, kk = tl.sum(weighted * values, 1), tl.sum(weighted * k, 1)
    found = tl.sum(weights * error * error, 1)
    refined = tl.where(kk > 0, xk / kk, scale)
    window = -half - offset + tl.where(refined < 0, 1.0, 0.0)
    better = found < pick_error
    return (
        tl.where(better, scale, pick_scale),
        tl.where(better, offset, pick_offset),
        tl.where(better, found, pick_error),
        tl.where(better, tl.abs(refined), pick_refined),
        tl.where(better, window, pick_window),
    )


@triton.jit
def _propose(extent, factor, half: tl.constexpr, symmetric: tl.constexpr):
    """A candidate: its scale, and where the lower of its two windows of k begins."""
    low, high, base = extent
    largest = tl.maximum(-low, high) / half
    scale = tl.where(factor == 0.0, largest, base * factor)
    first = tl.full(scale.shape, -half, tl.float32)
    if not symmetric:
        steady = tl.where(factor == 0.0, largest, tl.maximum(scale, base))
        first = tl.floor(low / steady)
        first = tl.minimum(tl.where(first >= 1.0 - 2.0 * half, first, 1.0 - 2.0 * half), -1.0)
    return scale, first


@triton.jit
def _rounded(scale, dtype: tl.constexpr):
    """Scales as `dtype` can hold them, in float32; too large ones can become infinite."""
    if dtype == tl.bfloat16:
        # A plain cast rounds down where the hardware has none of its own.
        bits = scale.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    return scale.to(dtype).to(tl.float32)


@triton.jit
def _settle(
    candidate, plain, unit, half: tl.constexpr, symmetric: tl.constexpr, dtype: tl.constexpr, limits
):
    """A candidate's scale, rounded to its dtype, and offset; plain rounding's where it is too large."""
    scale, window = candidate
    plain_scale, plain_offset = plain
    smallest, largest = limits
    if symmetric:
        scale = tl.where(window != -half, -scale, scale)
        offset = tl.zeros_like(scale)
    else:
        offset = -half - window
    scale = _rounded_in_unit(scale, unit, dtype, smallest)
    fits = tl.abs(scale) <= largest * unit
    return tl.where(fits, scale, plain_scale), tl.where(fits, offset, plain_offset)


@triton.jit
def _best_window(values, weights, candidate, best, half: tl.constexpr):
    """The better one of a candidate's two windows where it explains more than the best so far."""
    scale, first = candidate
    best_score, best_scale, best_window = best
    nearest = rint(values * (1.0 / scale)[:, None])
    for step in tl.static_range(2):
        start = first + step
        k = tl.minimum(tl.maximum(nearest, start[:, None]), (start + (2.0 * half - 1.0))[:, None])
        weighted = weights * k
        xk, kk = tl.sum(weighted * values, 1), tl.sum(weighted * k, 1)
        better = xk / kk * xk > best_score
        best_score = tl.where(better, xk / kk * xk, best_score)
        best_scale = tl.where(better, xk / kk, best_scale)
        best_window = tl.where(better, start, best_window)
    return best_score, best_scale, best_window


@triton.jit
def _searched(
    values,
    weights,
    pick,
    extent,
    plain,
    unit,
    factors_at,
    limits,
    candidates: tl.constexpr,
    half: tl.constexpr,
    symmetric: tl.constexpr,
    dtype: tl.constexpr,
):
    """The best scale and offset, beginning with the pick of plain rounding."""
    if half > 8.0:
        for number in range(candidates):
            factor = tl.load(factors_at + number)
            scale, first = _propose(extent, factor, half, symmetric)
            tried = _settle((scale, first), plain, unit, half, symmetric, dtype, limits)
            pick = _attempt(values, weights, tried, pick, half)
            if symmetric:
                tried = _settle((scale, first + 1.0), plain, unit, half, symmetric, dtype, limits)
                pick = _attempt(values, weights, tried, pick, half)
    else:
        score = tl.zeros_like(unit)
        best = score, score + 1.0, score - half
        for number in range(candidates):
            factor = tl.load(factors_at + number)
            candidate = _propose(extent, factor, half, symmetric)
            best = _best_window(values, weights, candidate, best, half)
        score, scale, window = best
        tried = _settle((scale, window), plain, unit, half, symmetric, dtype, limits)
        pick = _attempt(values, weights, tried, pick, half)
    pick_scale, pick_offset, _, refined, window = pick
    tried = _settle((refined, window), plain, unit, half, symmetric, dtype, limits)
    pick = _attempt(values, weights, tried, pick, half)

    pick_scale, pick_offset, _, _, _ = pick
    return pick_scale, pick_offset


@triton.jit
def _rounded_in_unit(scale, unit, dtype: tl.constexpr, smallest):
    """Scales as `dtype` can hold them once they are out of their group's unit."""
    scale = _rounded(tl.div_rn(scale, unit), dtype)
    return tl.where(scale == 0.0, smallest, scale) * unit


@triton.jit
def _prepare(values, half: tl.constexpr, symmetric: tl.constexpr, dtype: tl.constexpr, smallest):
    """Of each group its unit, extremes and base in it, and plain rounding's scale and offset."""
    low = tl.minimum(tl.min(values, 1), 0.0)
    high = tl.maximum(tl.max(values, 1), 0.0)
    magnitude = tl.maximum(-low, high)
    exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    unit = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    zero = magnitude == 0.0
    if symmetric:
        scale = tl.div_rn(magnitude, tl.full(magnitude.shape, half - 0.5, tl.float32))
        offset = tl.zeros_like(magnitude)
    else:
        scale = tl.div_rn(high - low, tl.full(magnitude.shape, 2.0 * half - 1.0, tl.float32))
        # 0 / 0, of a group too small for a scale, is the lowest.
        offset = -half - tl.div_rn(low, scale)
        offset = tl.where(offset >= -half, offset, -half)
        offset = tl.where(zero, 0.0, rint(tl.minimum(offset, half - 1.0)))
    base = tl.where(zero, unit, scale * unit)
    scale = _rounded_in_unit(base, unit, dtype, smallest)
    return unit, (low * unit, high * unit, base), (scale, offset)


@triton.jit
def _fit(
    values_at,
    weights_at,
    units_at,
    factors_at,
    codes_at,
    scales_at,
    zeros_at,
    sums_at,
    count,
    groups_of_a_row,
    smallest,
    largest,
    candidates: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    together: tl.constexpr,
    half: tl.constexpr,
    symmetric: tl.constexpr,
    by_square: tl.constexpr,
    dtype: tl.constexpr,
):
    """Quantize `together` groups of `size` columns, in tiles `width` wide."""
    group = tl.program_id(0) * together + tl.arange(0, together)
    column = tl.arange(0, width)
    real = group < count
    inside = real[:, None] & (column < size)[None, :]
    place = group.to(tl.int64)[:, None] * size + column[None, :]
    values = tl.load(values_at + place, inside, 0.0)
    # What isn't finite leaves a NaN.
    broken = tl.sum(values - values, 1) != 0.0
    unit, extent, plain = _prepare(values, half, symmetric, dtype, smallest)
    values = values * unit[:, None]
    weight_place = (group % groups_of_a_row)[:, None] * size + column[None, :]
    weights = tl.load(weights_at + weight_place, inside, 0.0)
    if by_square:
        weights = weights * values * values
    limits = smallest, largest

    pick_scale, pick_offset = plain
    excess = pick_scale > largest * unit
    nearest = pick_scale * 0.0
    if candidates > 0:
        pick = pick_scale, pick_offset, nearest + float("inf"), pick_scale, pick_offset
        pick_scale, pick_offset, nearest, refined, window = _attempt(
            values, weights, plain, pick, half
        )
        pick = pick_scale, pick_offset, nearest * MARGIN, refined, window
        pick_scale, pick_offset = _searched(
            values,
            weights,
            pick,
            extent,
            plain,
            unit,
            factors_at,
            limits,
            candidates,
            half,
            symmetric,
            dtype,
        )
    code = _coded(values, pick_scale, pick_offset, half)
    tl.store(codes_at + place, (code + half).to(tl.uint8), inside)
    tl.store(scales_at + group, tl.div_rn(pick_scale, unit), real)
    tl.store(zeros_at + group, (pick_offset + half).to(tl.uint8), real)
    error = values - (code - pick_offset[:, None]) * pick_scale[:, None]
    error = error * error
    weighted = tl.sum(weights * error, 1)
    if candidates == 0:
        nearest = weighted
    # These turn sums of the group's own unit into the caller's.
    square = 1.0 / (unit.to(tl.float64) * unit.to(tl.float64))
    caller = square * tl.load(units_at + group % groups_of_a_row)
    if by_square:
        caller = caller * square
    tl.store(sums_at + group, tl.sum(error, 1) * square, real)
    tl.store(sums_at + count + group, tl.sum(values * values, 1) * square, real)
    tl.store(sums_at + 2 * count + group, weighted * caller, real)
    tl.store(sums_at + 3 * count + group, nearest * caller, real)
    tl.store(sums_at + 4 * count + group, broken.to(tl.float64), real)
    tl.store(sums_at + 5 * count + group, excess.to(tl.float64), real)


DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def fit(
    parts: Tensor,
    weights: Tensor,
    units: Tensor,
    factors: Tensor,
    limits: tuple[torch.dtype, float, float],
    half: float,
    *,
    symmetric: bool,
    by_square: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize groups of at most `WIDEST` columns with the best scales found, or by plain rounding.

    Args:
        parts: float32 (rows, groups, columns of a group).
        weights: float32 (groups, columns of a group), at most 1.
        units: float64 (groups,), which turn weights into the caller's.
        factors: float32 (candidates,), none for plain rounding.
        limits: dtype of scales, its smallest number, its largest.
        half: 8 or 128.
        symmetric: whether zero points are all `half`.
        by_square: whether weights are multiplied with the squares of the values.

    Returns:
        Codes, uint8 in the shape of `parts`; scales, float32 (rows, groups), and zero points,
        uint8; and float64 (6,): sums of errors in the order of `ErrorSums`, the number of
        groups that hold what isn't finite, and of those whose scale is too large.
    """
    rows, of_a_row, size = parts.shape
    kind, smallest, largest = limits
    parts, count = parts.contiguous(), rows * of_a_row
    codes = torch.empty(parts.shape, dtype=torch.uint8, device=parts.device)
    scales = parts.new_empty((rows, of_a_row))
    zeros = codes.new_empty((rows, of_a_row))
    sums = units.new_empty((6, count))
    width = triton.next_power_of_2(size)
    together = max(1, TILE // width)
    # One thread compiles; others wait instead of compiling the same.
    with LAUNCHING, torch.cuda.device(parts.device):
        _fit[(triton.cdiv(count, together),)](
            parts,
            weights,
            units,
            factors,
            codes,
            scales,
            zeros,
            sums,
            count,
            of_a_row,
            smallest,
            largest,
            candidates=len(factors),
            size=size,
            width=width,
            together=together,
            half=half,
            symmetric=symmetric,
            by_square=by_square,
            dtype=DTYPES[kind],
            num_warps=max(4, min(32, together * width // WARP_VALUES)),
        )
    return codes, scales, zeros, sums.sum(1)
