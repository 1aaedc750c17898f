"""E4M3 under scales of rows or blocks, and E2M1 under 8-bit scales; see `quantize.floating`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gguf2st.arrays import on_device_of
from gguf2st.quantize.device.arithmetic import (
    checked_sums,
    divided,
    kernel_beside,
    rounded_scales,
    spread,
)
from gguf2st.quantize.errors import MARGIN
from gguf2st.quantize.floating import (
    BLOCK,
    E4M3,
    E8M0,
    LARGEST_E2M1,
    LARGEST_E4M3,
    MXFP4_GROUP,
    NVFP4_GROUP,
    Fp4Rows,
    Fp8Rows,
    Values,
)
from gguf2st.quantize.weights import group_weights


def quantize_fp8_rows(values: Tensor, scale_dtype: str, importance: Values | None) -> Fp8Rows:
    """See `gguf2st.quantize.quantize_fp8_rows`."""
    parts = values.reshape(len(values), 1, 1, -1)
    return _fp8(values, parts, scale_dtype, importance)


def quantize_fp8_blocks(values: Tensor, importance: Values | None) -> Fp8Rows:
    """See `gguf2st.quantize.quantize_fp8_blocks`."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    parts = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    return _fp8(values, parts, "F32", importance)


def _fp8(values: Tensor, parts: Tensor, dtype: str, importance: Values | None) -> Fp8Rows:
    """Quantize blocks: `parts` is (blocks, rows of one, blocks, columns of one)."""
    rows, columns = values.shape
    weights, unit = group_weights(importance, columns, columns)
    weighting = torch.nn.functional.pad(
        spread(weights, values), (0, parts.shape[2] * parts.shape[3] - columns)
    )
    largest = parts.abs().amax((1, 3), keepdim=True)
    wanted = divided(largest, LARGEST_E4M3)
    scales = torch.where(largest == 0, 1, rounded_scales(wanted, dtype))
    quotients = parts / scales
    codes = to_e4m3(quotients)
    error = quotients.sub(codes.float()).square_()
    square = scales.double().square()
    sums = [
        (error.sum((1, 3), keepdim=True) * square).sum(),
        (quotients.square_().sum((1, 3), keepdim=True) * square).sum(),
        (error.mul_(weighting.reshape(parts.shape[2:])).sum((1, 3), keepdim=True) * square).sum()
        * float(unit[0]),
    ]
    finite, fits = torch.isfinite(largest).all(), torch.isfinite(scales).all()
    errors = checked_sums(values, [*sums, sums[2]], finite, fits, dtype, wanted.max())
    shape = parts.shape[0] * parts.shape[1], parts.shape[2] * parts.shape[3]
    found = codes.view(torch.uint8).reshape(shape)[:rows, :columns].contiguous()
    return Fp8Rows(found, scales.reshape(parts.shape[0], parts.shape[2]), errors)


def to_e4m3(values: Tensor) -> Tensor:
    """The nearest numbers of E4M3, ties to even, of at most 448."""
    return values.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


def quantize_mxfp4(
    values: Tensor, importance: Values | None, steps: npt.NDArray[np.int64]
) -> Fp4Rows:
    """See `gguf2st.quantize.quantize_mxfp4`; `steps` are the scale codes tried beside the first."""
    parts = values.reshape(len(values), -1, MXFP4_GROUP)
    largest = parts.abs().amax(-1)
    exponents = (largest.view(torch.int32) + (1 << 21)) >> 23
    first = (exponents - 2).clamp(0, 254)
    return _fp4(values, parts, largest, importance, on_device_of(values, E8M0), first, steps)


def quantize_nvfp4(
    values: Tensor, divisor: float, importance: Values | None, steps: npt.NDArray[np.int64]
) -> Fp4Rows:
    """See `gguf2st.quantize.quantize_nvfp4`; `divisor` is the global scale."""
    parts = values.reshape(len(values), -1, NVFP4_GROUP)
    largest = parts.abs().amax(-1)
    wanted = (divided(largest, LARGEST_E2M1) * divisor).clamp(max=LARGEST_E4M3)
    codes = to_e4m3(wanted).view(torch.uint8).int()
    eighth = int(to_e4m3(torch.tensor(0.125)).view(torch.uint8))
    first = torch.where(codes == 0, eighth, codes)
    # Code 0 would be a scale of 0, and code 127 is NaN: entry i of the table is code i + 1.
    table = spread(E4M3[1:127] / np.float32(divisor), values)
    return _fp4(values, parts, largest, importance, table, first - 1, steps, base=1)


def _fp4(
    values: Tensor,
    parts: Tensor,
    largest: Tensor,
    importance: Values | None,
    table: Tensor,
    first: Tensor,
    steps: npt.NDArray[np.int64],
    base: int = 0,
) -> Fp4Rows:
    """Encode with the best of the scales beside `first`, whose codes begin at `base`."""
    weights, units = group_weights(importance, values.shape[1], parts.shape[-1])
    weighting = spread(weights, values).reshape(parts.shape[1:])
    # What isn't finite has no place in the table; it is refused in the end.
    first = first.clamp(0, len(table) - 1)
    kernel = kernel_beside("floating_kernel", parts)
    if kernel is None:
        codes, picked, sums = _fitted(parts, weighting, first, table, steps)
    else:
        codes, picked, sums = kernel.fit(
            parts, weighting, first.int(), table, spread(steps.astype(np.int32), values)
        )
    square = table[first].double() ** 2
    caller = square * spread(units, values)
    totals = [(sums[0] * square).sum(), (sums[1] * square).sum()]
    totals += [(sums[2] * caller).sum(), (sums[3] * caller).sum()]
    true = torch.ones((), device=values.device)
    errors = checked_sums(values, totals, torch.isfinite(largest).all(), true, "F32", true)
    return Fp4Rows(codes.reshape(values.shape), (picked + base).to(torch.uint8), errors)


def _fitted(
    parts: Tensor, weighting: Tensor, first: Tensor, table: Tensor, steps: npt.NDArray[np.int64]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `floating_kernel.fit`."""
    unit = 1 / table[first]
    code = first
    nearest = best = _error(parts, table[first], unit, weighting)
    best = best * MARGIN
    for step in steps.tolist()[1:]:
        tried = (first + step).clamp(0, len(table) - 1)
        error = _error(parts, table[tried], unit, weighting)
        code = torch.where(error < best, tried, code)
        best = torch.where(error < best, error, best)
    scale = table[code]
    number, size = _rounded(parts, scale)
    error = ((parts.abs() - size * scale[..., None]) * unit[..., None]).square_()
    squared, weighted = error.sum(-1), error.mul_(weighting).sum(-1)
    norm = (parts * unit[..., None]).square_().sum(-1)
    codes = (number + (parts < 0) * 8).to(torch.uint8)
    return codes, code, torch.stack([squared, norm, weighted, nearest])


def _rounded(parts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The number of the nearest magnitude among 0, .5, 1, 1.5, 2, 3, 4, 6, and that magnitude."""
    size = (parts / scale[..., None]).abs_().clamp_(max=LARGEST_E2M1)
    # Steps are 1/2 below 2, 1 below 4, and 2 from there on.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    first = torch.where(size < 2, 0.0, torch.where(size < 4, 2.0, 4.0))
    steps = size.div_(step).round_()
    return steps + first, steps * step


def _error(parts: Tensor, scale: Tensor, unit: Tensor, weights: Tensor) -> Tensor:
    _, size = _rounded(parts, scale)
    error = (parts.abs() - size * scale[..., None]) * unit[..., None]
    return error.square_().mul_(weights).sum(-1)
