"""FP8, MXFP4 and NVFP4, against torch and compressed-tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from gguf2st.quantize import (
    ScaleRangeError,
    nvfp4_global_scale,
    pack_nibbles,
    quantize_fp8_blocks,
    quantize_fp8_rows,
    quantize_mxfp4,
    quantize_nvfp4,
)
from gguf2st.quantize.floating import E4M3, E8M0
from tests.quantize.oracle import TORCH, compress, decompress, extremes
from tests.quantize.samples import importance, matrix, weighted_error

SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MXFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
)
NVFP4 = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype=torch.float8_e4m3fn,
)


def e4m3(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def fp4_values(codes: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    values = SIZES[codes & 7] * np.where(codes & 8, -1, 1).astype(np.float32)
    return values * scales.repeat(group, axis=1)


def check_errors(errors, values, back, nearest, weights):
    assert errors.squared == pytest.approx(weighted_error(values, back, None), rel=1e-4)
    assert errors.norm == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-4)
    assert errors.weighted == pytest.approx(weighted_error(values, back, weights), rel=1e-4)
    plain = weighted_error(values, nearest, weights)
    assert errors.weighted_nearest == pytest.approx(plain, rel=1e-4)


def test_tables():
    assert np.array_equal(E4M3, e4m3(np.arange(256, dtype=np.uint8)).float(), equal_nan=True)
    assert np.array_equal(E8M0, np.exp2(np.arange(255.0) - 127).astype(np.float32))


def test_casts_are_those_of_torch():
    rng = np.random.default_rng(0)
    known = E4M3[np.isfinite(E4M3)]
    ties = (np.sort(known)[1:] + np.sort(known)[:-1]) / 2
    spread = (rng.standard_normal(50000) * np.exp(rng.normal(0, 4, 50000))).astype(np.float32)
    beside = np.nextafter(ties, np.float32([[-1e9], [1e9]])).reshape(-1)
    ends = np.array([0.0, -0.0, 448, -448, 1e-45, -1e-45], np.float32)
    values = np.concatenate([known, ties, beside, spread, ends]).clip(-448, 448)
    rows = quantize_fp8_rows(values[None])
    assert rows.scales == 1
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn)
    assert np.array_equal(rows.codes[0], theirs.view(torch.uint8).numpy())


def test_what_a_rounded_scale_leaves_too_large_becomes_the_largest():
    values = np.array([[627, -627, 100]], np.float32) * np.float32(2**-24)
    rows = quantize_fp8_rows(values, "F16")
    assert rows.scales == 2.0**-24  # 1.4 times as much was wanted
    assert np.array_equal(E4M3[rows.codes], [[448, -448, 96]])


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (19, 200), (3, 1000)])
def test_fp8_rows_are_those_of_compressed_tensors(shape, dtype):
    values = matrix(*shape)
    weights = importance(shape[1])
    rows = quantize_fp8_rows(values, dtype, weights)
    x = torch.from_numpy(values)
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel", scale_dtype=TORCH[dtype])
    scales, zeros = calculate_qparams(*extremes(x, 0), args)
    assert rows.scales.dtype == np.float32
    assert np.array_equal(rows.scales, scales.numpy())
    state = {"weight": x, "weight_scale": scales, "weight_zero_point": zeros}
    theirs = compress("float-quantized", args, state)["weight"]
    assert np.array_equal(rows.codes, theirs.view(torch.uint8).numpy())
    back = (e4m3(rows.codes).float() * scales).numpy()
    check_errors(rows.errors, values, back, back, weights)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (100, 130), (300, 64)])
def test_fp8_blocks_are_those_of_compressed_tensors(shape):
    values = matrix(*shape)
    weights = importance(shape[1])
    rows = quantize_fp8_blocks(values, weights)
    count = tuple(-(-extent // 128) for extent in shape)
    assert rows.scales.shape == count
    padded = np.zeros((count[0] * 128, count[1] * 128), np.float32)
    padded[: shape[0], : shape[1]] = values
    blocks = torch.from_numpy(padded).reshape(count[0], 128, count[1], 128)
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    assert np.array_equal(rows.scales, scales.numpy())
    state = {
        "weight": torch.from_numpy(values),
        "weight_scale": scales,
        "weight_zero_point": zeros,
    }
    theirs = compress("float-quantized", args, state)["weight"]
    assert np.array_equal(rows.codes, theirs.view(torch.uint8).numpy())
    spread = rows.scales.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    back = e4m3(rows.codes).float().numpy() * spread
    check_errors(rows.errors, values, back, back, weights)
    if shape[0] > 128:
        chunks = [quantize_fp8_blocks(part, weights) for part in np.split(values, [128])]
        assert np.array_equal(np.concatenate([c.codes for c in chunks]), rows.codes)
        assert np.array_equal(np.concatenate([c.scales for c in chunks]), rows.scales)


def test_fp8_scales_stay_in_range():
    values = matrix(8, 64)
    values[3] = 0
    rows = quantize_fp8_rows(values, "F16")
    assert rows.scales[3] == 1
    assert not rows.codes[3].any()
    tiny = quantize_fp8_rows(np.full((1, 4), 1e-9, np.float32), "F16")
    assert tiny.scales[0, 0] == 2.0**-24
    with pytest.raises(ScaleRangeError, match=r"a scale would be 66964\.3, more than F16"):
        quantize_fp8_rows(np.full((1, 4), 3e7, np.float32), "F16")
    with pytest.raises(ValueError, match="stored as F8"):
        quantize_fp8_rows(values, "F8")


@pytest.mark.parametrize("quantize", [
    quantize_fp8_rows,
    quantize_fp8_blocks,
    quantize_mxfp4,
    lambda values: quantize_nvfp4(values, 1.0),
])  # fmt: skip
def test_what_is_not_a_number_is_refused(quantize):
    values = matrix(9, 64)
    values[5, 60] = np.nan
    with pytest.raises(ValueError, match="row 5, column 60 holds nan, not a number"):
        quantize(values)


@pytest.mark.parametrize("scale", [0.02, 1e-5, 3000])
def test_mxfp4_is_that_of_compressed_tensors(scale):
    values = matrix(35, 320, scale=scale)
    values[7, 3] = -0.0
    values[8, :32] = [*np.linspace(0, 1.75, 31), 1.75]  # where the exponent steps up
    rows = quantize_mxfp4(values, fit="rtn")
    x = torch.from_numpy(values)
    scales, _ = calculate_qparams(*extremes(x, 32), MXFP4)
    theirs = compress("mxfp4-pack-quantized", MXFP4, {"weight": x, "weight_scale": scales})
    assert np.array_equal(rows.scales, theirs["weight_scale"].numpy())
    assert np.array_equal(pack_nibbles(rows.codes), theirs["weight_packed"].numpy())
    back = fp4_values(rows.codes, E8M0[rows.scales], 32)
    decoded = decompress("mxfp4-pack-quantized", MXFP4, theirs)["weight"]
    assert np.array_equal(back, decoded.float().numpy())


@pytest.mark.parametrize("scale", [0.02, 1e-5, 3000])
def test_nvfp4_is_that_of_compressed_tensors(scale):
    values = matrix(35, 320, scale=scale)
    values[6, 40] = 1e-9 * scale  # a group whose scale vanishes
    values[6, 41:48] = values[6, 32:40] = 0
    x = torch.from_numpy(values)
    global_scale = generate_gparam(x.amin(), x.amax())
    assert nvfp4_global_scale(abs(values).max()) == global_scale.item()
    rows = quantize_nvfp4(values, global_scale.item(), fit="rtn")
    scales, _ = calculate_qparams(*extremes(x, 16), NVFP4, global_scale)
    state = {"weight": x, "weight_scale": scales, "weight_global_scale": global_scale}
    theirs = compress("nvfp4-pack-quantized", NVFP4, state)
    assert np.array_equal(rows.scales, theirs["weight_scale"].view(torch.uint8).numpy())
    assert np.array_equal(pack_nibbles(rows.codes), theirs["weight_packed"].numpy())


def test_global_scales_of_extremes():
    for maximum in (0.0, 1e-39, 1e-36, 0.5, 6.0, 3e38):
        bound = torch.tensor(maximum, dtype=torch.float32)
        assert nvfp4_global_scale(maximum) == generate_gparam(-bound, bound).item()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("group", [16, 32])
def test_fp4_search_is_never_worse_than_rounding(group, weighted):
    values = matrix(37, 320, seed=1)
    weights = importance(320) if weighted else None
    global_scale = nvfp4_global_scale(abs(values).max())

    def run(part, fit):
        if group == 32:
            rows = quantize_mxfp4(part, weights, fit)
            return rows, fp4_values(rows.codes, E8M0[rows.scales], 32)
        rows = quantize_nvfp4(part, global_scale, weights, fit)
        scales = E4M3[rows.scales] / np.float32(global_scale)
        return rows, fp4_values(rows.codes, scales, 16)

    rows, back = run(values, "search")
    _, nearest = run(values, "rtn")
    check_errors(rows.errors, values, back, nearest, weights)
    for first in range(0, 320, group):
        piece = slice(first, first + group)
        some = None if weights is None else weights[piece]
        for row in range(len(values)):
            one = weighted_error(values[row, piece], back[row, piece], some)
            assert one <= weighted_error(values[row, piece], nearest[row, piece], some)
    assert rows.errors.weighted < rows.errors.weighted_nearest
    chunks = [run(part, "search")[0] for part in np.split(values, [1, 16, 33])]
    assert np.array_equal(np.concatenate([chunk.codes for chunk in chunks]), rows.codes)
    assert np.array_equal(np.concatenate([chunk.scales for chunk in chunks]), rows.scales)


def test_values_of_fp4_formats_come_back_as_they_were():
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (20, 320)).astype(np.uint8)
    codes[:, ::16] = 7
    powers = rng.integers(110, 130, (20, 10)).astype(np.uint8)
    values = fp4_values(codes, E8M0[powers], 32)
    for fit in ("search", "rtn"):
        rows = quantize_mxfp4(values, fit=fit)
        assert np.array_equal(fp4_values(rows.codes, E8M0[rows.scales], 32), values)
    scales = rng.integers(40, 126, (20, 20)).astype(np.uint8)
    scales[0, 0] = 126
    values = fp4_values(codes, E4M3[scales] / np.float32(512), 16)
    for fit in ("search", "rtn"):
        rows = quantize_nvfp4(values, 512.0, fit=fit)
        assert np.array_equal(rows.scales, scales)
        assert np.array_equal(fp4_values(rows.codes, E4M3[rows.scales] / 512, 16), values)


@pytest.mark.parametrize("fit", ["search", "rtn"])
def test_zero_groups_and_extreme_magnitudes(fit):
    zeros = np.zeros((2, 64), np.float32)
    for rows in (quantize_mxfp4(zeros, fit=fit), quantize_nvfp4(zeros, 1.0, fit=fit)):
        assert not rows.codes.any()
        assert rows.errors.squared == rows.errors.norm == 0
    for magnitude in (1e37, 1e-40):
        values = np.linspace(-magnitude, magnitude, 64, dtype=np.float32)[None]
        rows = quantize_mxfp4(values, fit=fit)
        back = fp4_values(rows.codes, E8M0[rows.scales], 32)
        assert abs(values - back).max() <= max(magnitude / 4, 2.0**-127)


def test_shapes_that_do_not_fit_are_refused():
    values = matrix(4, 40)
    with pytest.raises(ValueError, match="groups of 32 columns don't divide rows of 40"):
        quantize_mxfp4(values)
    with pytest.raises(ValueError, match="groups of 16 columns don't divide rows of 40"):
        quantize_nvfp4(values, 1.0)
    for bad in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="global scale"):
            quantize_nvfp4(matrix(4, 64), bad)
    with pytest.raises(ValueError, match="fit is 'best'"):
        quantize_mxfp4(matrix(4, 64), fit="best")
