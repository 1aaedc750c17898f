"""Rounding and search of E2M1 in one kernel for GPUs, with the names of `floating`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gguf2st.quantize.device.integer_kernel import LAUNCHING, MARGIN, TILE, rint


@triton.jit
def _rounded(values, scale):
    """The number of the nearest magnitude among 0, .5, 1, 1.5, 2, 3, 4, 6, and that magnitude."""
    size = tl.abs(tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)))
    size = tl.minimum(size, 6.0)
    # Steps are 1/2 below 2, 1 below 4, and 2 from there on.
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    first = tl.where(size < 2.0, 0.0, tl.where(size < 4.0, 2.0, 4.0))
    steps = rint(size / step)
    return steps + first, steps * step


@triton.jit
def _errors(values, size, scale, unit):
    error = (tl.abs(values) - size * scale[:, None]) * unit[:, None]
    return error * error


@triton.jit
def _fit(
    values_at,
    weights_at,
    first_at,
    table_at,
    steps_at,
    codes_at,
    picked_at,
    sums_at,
    count,
    groups_of_a_row,
    entries,
    candidates: tl.constexpr,
    width: tl.constexpr,
    together: tl.constexpr,
):
    """Encode `together` groups of `width` columns with the best of the scales beside the first."""
    group = tl.program_id(0) * together + tl.arange(0, together)
    column = tl.arange(0, width)
    real = group < count
    inside = real[:, None] & (column < width)[None, :]
    place = group.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(values_at + place, inside, 0.0)
    weight_place = (group % groups_of_a_row)[:, None] * width + column[None, :]
    weights = tl.load(weights_at + weight_place, inside, 0.0)
    first = tl.load(first_at + group, real, 0)
    scale = tl.load(table_at + first)
    unit = 1.0 / scale
    picked, best_scale = first, scale
    _, size = _rounded(values, scale)
    nearest = tl.sum(weights * _errors(values, size, scale, unit), 1)
    best = nearest * MARGIN
    for number in range(1, candidates):
        tried = first + tl.load(steps_at + number)
        tried = tl.minimum(tl.maximum(tried, 0), entries - 1)
        scale = tl.load(table_at + tried)
        _, size = _rounded(values, scale)
        error = tl.sum(weights * _errors(values, size, scale, unit), 1)
        better = error < best
        picked, best = tl.where(better, tried, picked), tl.where(better, error, best)
        best_scale = tl.where(better, scale, best_scale)
    number, size = _rounded(values, best_scale)
    code = number + tl.where(values < 0.0, 8.0, 0.0)
    tl.store(codes_at + place, code.to(tl.uint8), inside)
    tl.store(picked_at + group, picked, real)
    errors, values = _errors(values, size, best_scale, unit), values * unit[:, None]
    tl.store(sums_at + group, tl.sum(errors, 1), real)
    tl.store(sums_at + count + group, tl.sum(values * values, 1), real)
    tl.store(sums_at + 2 * count + group, tl.sum(weights * errors, 1), real)
    tl.store(sums_at + 3 * count + group, nearest, real)


def fit(
    parts: Tensor, weights: Tensor, first: Tensor, table: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode groups with the best of the scales that are tried.

    Args:
        parts: float32 (rows, groups, columns of a group); the columns are a power of two.
        weights: float32 (groups, columns of a group).
        first: int32 (rows, groups), plain rounding's place in the table of scales.
        table: float32 (scales,).
        steps: int32 (candidates,), what is added to `first`; 0 comes first.

    Returns:
        Codes, uint8 in the shape of `parts`; places in the table, int32 (rows, groups); and
        float32 (4, rows, groups), sums in the unit of the first scale: of squared errors, of
        squares, of weighted squared errors, and of these of plain rounding.
    """
    rows, of_a_row, width = parts.shape
    parts, count = parts.contiguous(), rows * of_a_row
    codes = torch.empty(parts.shape, dtype=torch.uint8, device=parts.device)
    picked, sums = torch.empty_like(first), parts.new_empty((4, rows, of_a_row))
    together = TILE // width
    with LAUNCHING, torch.cuda.device(parts.device):
        _fit[(triton.cdiv(count, together),)](
            parts,
            weights,
            first,
            table,
            steps,
            codes,
            picked,
            sums,
            count,
            of_a_row,
            len(table),
            candidates=len(steps),
            width=width,
            together=together,
        )
    return codes, picked, sums
