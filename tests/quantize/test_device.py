"""Tensors against arrays: the same bits where nothing is searched, else as good a fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gguf2st.arrays import to_host
from gguf2st.quantize import (
    IntegerGrid,
    ScaleRangeError,
    dequantize_rows,
    pack_awq,
    pack_gptq,
    pack_gptq_zeros,
    pack_nibbles,
    pack_rows,
    pack_zeros_down,
    quantize_fp8_blocks,
    quantize_fp8_rows,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_rows,
)
from tests.quantize.samples import importance, matrix, weighted_error

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
GRIDS = [
    (bits, group, symmetric)
    for bits in (4, 8)
    for group in (16, 32, 64, 128, 0)
    for symmetric in (True, False)
]
GROUP_FIELDS = ("codes", "scales", "zeros")


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


def ragged_magnitudes(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Groups from the smallest to large numbers, some with subnormal ones, some constant or zero."""
    rng = np.random.default_rng([seed, rows, columns])
    exponents = rng.integers(-150, 12, (rows, columns // 8)).repeat(8, axis=1)
    values = rng.standard_normal((rows, columns)) * np.exp2(np.sort(exponents, axis=1) * 1.0)
    values[rng.random((rows, columns)) < 0.05] = 0
    values[: rows // 4] = 0
    values[rows // 4] = -0.0
    values[rows // 4 + 1] = 2.0**-149
    return values.astype(np.float32)


def matrices(rows: int, columns: int) -> list[np.ndarray]:
    return [matrix(rows, columns), ragged_magnitudes(rows, columns), -matrix(rows, columns, 1)]


def assert_same(found, expected, fields=GROUP_FIELDS):
    for field in fields:
        ours, theirs = to_host(getattr(found, field)), getattr(expected, field)
        assert ours.dtype == theirs.dtype, field
        assert np.array_equal(ours, theirs), field
        assert ours.tobytes() == theirs.tobytes(), field
    assert_same_errors(found.errors, expected.errors)


# Differences of nearly equal numbers: their last digits depend on whether a product and a difference
# are rounded once or twice, and on the order of the sum.
def assert_same_errors(found, expected, rel=1e-4):
    for field in ("squared", "norm", "weighted", "weighted_nearest"):
        # Squares of the smallest numbers are lost in sums of others.
        expectation = pytest.approx(getattr(expected, field), rel=rel, abs=1e-70)
        assert getattr(found, field) == expectation, field


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize(("bits", "group", "symmetric"), GRIDS)
def test_rounding_integers_gives_the_same_bits(bits, group, symmetric, dtype, device):
    grid = IntegerGrid(bits, group, symmetric, dtype)
    for values in matrices(37, 384):
        for weights in (None, importance(384)):
            for by_square in (False, True):
                expected = quantize_rows(values, grid, weights, "rtn", by_square=by_square)
                found = quantize_rows(
                    torch.from_numpy(values).to(device), grid, weights, "rtn", by_square=by_square
                )
                assert found.codes.device.type == device
                assert_same(found, expected)
    assert np.array_equal(to_host(dequantize_rows(found, grid)), dequantize_rows(expected, grid))


@pytest.mark.parametrize("weighting", ["none", "importance", "square"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize(("bits", "group", "symmetric"), GRIDS)
def test_the_search_is_as_good(bits, group, symmetric, dtype, weighting, device):
    grid = IntegerGrid(bits, group, symmetric, dtype)
    weights = importance(384) if weighting == "importance" else None
    for values in (matrix(61, 384), matrix(48, 384, 3, scale=3e-3)):
        options = {"by_square": weighting == "square"}
        expected = quantize_rows(values, grid, weights, **options)
        tensor = torch.from_numpy(values).to(device)
        found = quantize_rows(tensor, grid, weights, **options)
        assert found.errors.weighted == pytest.approx(expected.errors.weighted, rel=1e-3)
        assert found.errors.weighted <= found.errors.weighted_nearest
        own = (found, dequantize_rows(found, grid))
        nearest = dequantize_rows(quantize_rows(tensor, grid, weights, "rtn", **options), grid)
        factors = np.ones(384) if weights is None else weights.astype(np.float64)
        if weighting == "square":
            factors = factors * values.astype(np.float64) ** 2
        check = weighted_error(values, to_host(own[1]), factors)
        assert found.errors.weighted == pytest.approx(check, rel=2e-5)
        # Never worse than plain rounding, in any group.
        size = group or 384
        errors = [
            ((values.astype(np.float64) - to_host(back)) ** 2 * factors).reshape(-1, size).sum(1)
            for back in (own[1], nearest)
        ]
        assert (errors[0] <= errors[1]).all()


def test_values_on_a_grid_come_back_as_they_were(device):
    rng = np.random.default_rng(3)
    codes = rng.integers(-8, 8, (64, 8, 32)).astype(np.float32)
    codes[:, :, 5] = -8
    scales = (rng.standard_normal((64, 8)) * 0.01).astype(np.float16).astype(np.float32)
    values = (codes * scales[:, :, None]).reshape(64, 256)
    for symmetric in (True, False):
        grid = IntegerGrid(4, 32, symmetric, "F16")
        rows = quantize_rows(torch.from_numpy(values).to(device), grid)
        assert np.array_equal(to_host(dequantize_rows(rows, grid)), values)
        if symmetric:
            assert np.array_equal(to_host(rows.scales), scales)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shape", [(8, 64), (19, 200), (12, 1000)])
def test_fp8_rows(shape, dtype, device):
    for values in matrices(*shape):
        for weights in (None, importance(shape[1])):
            expected = quantize_fp8_rows(values, dtype, weights)
            found = quantize_fp8_rows(torch.from_numpy(values).to(device), dtype, weights)
            assert_same(found, expected, ("codes", "scales"))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (100, 136), (300, 64)])
def test_fp8_blocks(shape, device):
    for values in matrices(*shape):
        for weights in (None, importance(shape[1])):
            expected = quantize_fp8_blocks(values, weights)
            found = quantize_fp8_blocks(torch.from_numpy(values).to(device), weights)
            assert_same(found, expected, ("codes", "scales"))


@pytest.mark.parametrize("fit", ["rtn", "search"])
@pytest.mark.parametrize("weighted", [False, True])
def test_fp4(fit, weighted, device):
    weights = importance(384) if weighted else None
    for values in matrices(37, 384):
        tensor = torch.from_numpy(values).to(device)
        for ours, theirs in [
            (quantize_mxfp4(tensor, weights, fit), quantize_mxfp4(values, weights, fit)),
            *(
                (
                    quantize_nvfp4(tensor, scale, weights, fit),
                    quantize_nvfp4(values, scale, weights, fit),
                )
                for scale in (1.0, 2688 / 0.7, 3e-4)
            ),
        ]:
            if fit == "rtn":
                assert_same(ours, theirs, ("codes", "scales"))
            else:
                assert ours.errors.weighted == pytest.approx(theirs.errors.weighted, rel=1e-3)
                assert ours.errors.weighted <= ours.errors.weighted_nearest


@pytest.mark.parametrize("shape", [(8, 32), (16, 128), (256, 96), (24, 64)])
def test_packing(shape, device):
    rng = np.random.default_rng(1)
    nibbles, octets = rng.integers(0, 16, shape, np.uint8), rng.integers(0, 256, shape, np.uint8)
    there = [torch.from_numpy(codes).to(device) for codes in (nibbles, octets)]
    cases = [
        (pack_rows, (4,), 0),
        (pack_rows, (8,), 1),
        (pack_nibbles, (), 0),
        (pack_zeros_down, (4,), 0),
        (pack_zeros_down, (8,), 1),
        (pack_awq, (), 0),
        (pack_gptq, (4,), 0),
        (pack_gptq, (8,), 1),
        (pack_gptq_zeros, (4, 2), 0),
        (pack_gptq_zeros, (8, 2), 1),
    ]
    for pack, options, which in cases:
        expected, found = (pack(codes[which], *options) for codes in ((nibbles, octets), there))
        assert found.is_contiguous()
        assert to_host(found).dtype == expected.dtype
        assert np.array_equal(to_host(found), expected), pack
    ragged = pack_rows(there[0][:, :-3], 4)
    assert np.array_equal(to_host(ragged), pack_rows(np.ascontiguousarray(nibbles[:, :-3]), 4))
    ragged = pack_zeros_down(there[0][:-3], 4)
    assert np.array_equal(to_host(ragged), pack_zeros_down(nibbles[:-3], 4))


def test_packing_into_a_larger_tensor(device):
    codes = np.random.default_rng(2).integers(0, 16, (16, 64), np.uint8)
    tensor = torch.from_numpy(codes).to(device)
    whole = torch.zeros((64, 4), dtype=torch.int32, device=device)
    pack_awq(tensor, whole[:, 1:3])
    assert np.array_equal(to_host(whole[:, 1:3]), pack_awq(codes))
    assert not whole[:, [0, 3]].any()
    whole = torch.zeros((8, 20), dtype=torch.int32, device=device)
    pack_gptq(tensor, 4, whole[:, 2:18])
    assert np.array_equal(to_host(whole[:, 2:18]), pack_gptq(codes, 4))
    with pytest.raises(ValueError, match=r"out is torch.int32 \(8, 20\), not int32 \(8, 16\)"):
        pack_gptq(tensor, 4, whole)
    with pytest.raises(ValueError, match="zero point of 0"):
        pack_gptq_zeros(torch.zeros((8, 2), dtype=torch.uint8, device=device), 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_refused_by_place(bad, device):
    values = matrix(20, 64)
    values[17, 33] = bad
    tensor = torch.from_numpy(values).to(device)
    for quantize in (
        lambda: quantize_rows(tensor, IntegerGrid(4, 32, True, "F16")),
        lambda: quantize_rows(tensor, IntegerGrid(4, 32, False, "F16"), fit="rtn"),
        lambda: quantize_fp8_rows(tensor),
        lambda: quantize_fp8_blocks(tensor),
        lambda: quantize_mxfp4(tensor),
        lambda: quantize_nvfp4(tensor, 1.0),
    ):
        with pytest.raises(ValueError, match=r"row 17, column 33 holds -?(nan|inf), not a number"):
            quantize()


@pytest.mark.parametrize("fit", ["search", "rtn"])
def test_scales_beyond_their_dtype_are_refused(fit, device):
    values = torch.full((2, 32), 65504.0 * 8, device=device)
    with pytest.raises(ScaleRangeError, match=r"69870\.9, more than F16 can hold"):
        quantize_rows(values, IntegerGrid(4, 32, True, "F16"), fit=fit)
    quantize_rows(values, IntegerGrid(4, 32, True, "BF16"), fit=fit)
    with pytest.raises(ScaleRangeError, match="more than F16"):
        quantize_fp8_rows(values * 100, "F16")
    values[0, 0], values[0, 1] = 3e38, -3e38
    with pytest.raises(ScaleRangeError, match="more than F32"):
        quantize_rows(values, IntegerGrid(4, 32, False, "F32"), fit=fit)


def test_what_does_not_fit_is_refused():
    grid, values = IntegerGrid(4, 32, True, "F16"), torch.zeros((4, 48))
    with pytest.raises(ValueError, match="groups of 32 columns don't divide rows of 48"):
        quantize_rows(values, grid)
    with pytest.raises(ValueError, match="float64"):
        quantize_rows(values.double()[:, :32], grid)
    with pytest.raises(ValueError, match="fit is 'best'"):
        quantize_rows(values[:, :32], grid, fit="best")
