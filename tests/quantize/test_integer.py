"""Integer codes, against compressed-tensors and against what the search promises."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf2st.gguf.blocks import PackedRows
from gguf2st.quantize import IntegerGrid, ScaleRangeError, dequantize_rows, quantize_rows
from tests.blocks.samples import KINDS, sound_bytes
from tests.quantize.oracle import TORCH, round_to_nearest
from tests.quantize.samples import importance, matrix, weighted_error

GRIDS = [
    (bits, group, symmetric)
    for bits in (4, 8)
    for group in (16, 32, 64, 128, 0)
    for symmetric in (True, False)
]


def quantized(values, grid, weights=None, fit="search", **options):
    rows = quantize_rows(values, grid, weights, fit, **options)
    back = dequantize_rows(rows, grid)
    assert rows.codes.dtype == rows.zeros.dtype == np.uint8
    assert rows.scales.dtype == back.dtype == np.float32
    assert rows.codes.max() < 1 << grid.bits
    assert rows.zeros.max() < 1 << grid.bits
    if grid.symmetric:
        assert (rows.zeros == 1 << (grid.bits - 1)).all()
    stored = torch.from_numpy(rows.scales).to(TORCH[grid.scale_dtype]).float().numpy()
    assert np.array_equal(stored, rows.scales)
    assert np.isfinite(rows.scales).all()
    assert (rows.scales != 0).all()
    return rows, back


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("bits", "group", "symmetric"), GRIDS)
def test_rounding_to_nearest_is_that_of_compressed_tensors(bits, group, symmetric, dtype):
    values = matrix(37, 384)
    values[0, : 384 // 2] = 0.001  # zero groups get other scales on purpose, see below
    grid = IntegerGrid(bits, group, symmetric, dtype)
    rows, back = quantized(values, grid, fit="rtn")
    codes, scales, zeros, theirs = round_to_nearest(values, bits, group, symmetric, dtype)
    assert np.array_equal(rows.scales, scales)
    assert np.array_equal(rows.zeros, zeros)
    assert np.array_equal(rows.codes, codes)
    assert np.array_equal(back, theirs)


# So many rows that 16 divides their groups or doesn't, and one kernel call takes several strips.
@pytest.mark.parametrize("rows", [16, 37, 80])
@pytest.mark.parametrize(("bits", "group", "symmetric"), GRIDS)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "IQ3_XXS", "BF16"])
def test_packed_rows_are_rounded_as_their_values(kind, bits, group, symmetric, rows):
    block_type = KINDS[kind]
    raw = sound_bytes(block_type, rows * 512 // block_type.block_size, seed=rows)
    if kind == "BF16":
        raw[:, 1] = 0x3D | raw[:, 1] & 0x82
    values = gguf.quants.dequantize(raw.ravel(), gguf.GGMLQuantizationType[kind])
    values = values.reshape(rows, 512)
    packed = PackedRows(block_type, raw.reshape(rows, -1), 512)
    found = quantize_rows(packed, IntegerGrid(bits, group, symmetric, "F16"), fit="rtn")
    codes, scales, zeros, _ = round_to_nearest(values, bits, group, symmetric, "F16")
    assert np.array_equal(found.scales, scales)
    assert np.array_equal(found.zeros, zeros)
    assert np.array_equal(found.codes, codes)
    norm = np.square(values.astype(np.float64)).sum()
    assert found.errors.norm == pytest.approx(norm, rel=1e-6)  # float32 sums of a line


def test_packed_rows_that_cannot_be_rounded_are_refused():
    kind = KINDS["Q8_0"]
    raw = sound_bytes(kind, 16 * 16, seed=1).reshape(16, -1)
    raw[9, 34 * 3 : 34 * 3 + 2] = 0, 0x7C  # an infinite scale
    with pytest.raises(ValueError, match=r"row 9, column 96 holds .*(nan|inf), not a number"):
        quantize_rows(PackedRows(kind, raw, 512), IntegerGrid(4, 32, True, "F16"), fit="rtn")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("bits", "group", "symmetric"), GRIDS)
def test_search_is_better_than_rounding_and_counts_its_errors(bits, group, symmetric, weighted):
    values = matrix(21, 256, seed=1)
    weights = importance(256) if weighted else None
    grid = IntegerGrid(bits, group, symmetric, "F16")
    rows, back = quantized(values, grid, weights)
    _, nearest = quantized(values, grid, weights, fit="rtn")
    size = group or 256
    for first in range(0, 256, size):
        piece = slice(first, first + size)
        some = None if weights is None else weights[piece]
        for row in range(len(values)):
            one, other = (
                weighted_error(values[row, piece], result[row, piece], some)
                for result in (back, nearest)
            )
            assert one <= other
    error = weighted_error(values, back, weights)
    plain = weighted_error(values, nearest, weights)
    assert error < plain * (0.99 if bits == 4 else 1)
    assert rows.errors.squared == pytest.approx(weighted_error(values, back, None), rel=1e-5)
    assert rows.errors.norm == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-5)
    assert rows.errors.weighted == pytest.approx(error, rel=1e-5)
    assert rows.errors.weighted_nearest == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("fit", ["search", "rtn"])
@pytest.mark.parametrize("group", [32, 128, 0])
def test_results_do_not_depend_on_the_chunks(fit, group):
    values, weights = matrix(53, 384, seed=2), importance(384)
    for grid in (IntegerGrid(4, group, False, "BF16"), IntegerGrid(8, group, True, "F16")):
        whole = quantize_rows(values, grid, weights, fit)
        for cuts in ([1, 17, 18, 50], [16, 32, 48], [52]):
            chunks = [quantize_rows(chunk, grid, weights, fit) for chunk in np.split(values, cuts)]
            for field in ("codes", "scales", "zeros"):
                joined = np.concatenate([getattr(chunk, field) for chunk in chunks])
                assert np.array_equal(joined, getattr(whole, field))
        strided = np.ascontiguousarray(values.T).T
        assert np.array_equal(quantize_rows(strided, grid, weights, fit).codes, whole.codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_values_of_q4_0_come_back_as_they_were(symmetric, dtype):
    rng = np.random.default_rng(3)
    codes = rng.integers(-8, 8, (64, 8, 32)).astype(np.float32)
    codes[:, :, 5] = -8  # what the reference quantizer makes of the largest magnitude
    scales = (rng.standard_normal((64, 8)) * 0.01).astype(np.float16).astype(np.float32)
    values = (codes * scales[:, :, None]).reshape(64, 256)
    grid = IntegerGrid(4, 32, symmetric, dtype)
    rows, back = quantized(values, grid)
    if dtype == "F16":
        assert np.array_equal(back, values)
        assert rows.errors.squared == 0
        if symmetric:
            assert np.array_equal(rows.scales, scales)
    else:  # a float32 scale can be off in its last bits
        assert rows.errors.relative_rmse < 1e-6


def test_values_of_q8_0_and_q5_0_come_back_as_they_were():
    rng = np.random.default_rng(4)
    scales = rng.uniform(0.001, 0.02, (64, 8)).astype(np.float16).astype(np.float32)
    grid = IntegerGrid(8, 32, True, "F16")
    for low, high, largest in ((-127, 127, 127), (-127, 127, -127), (-16, 15, -16)):
        codes = rng.integers(low, high + 1, (64, 8, 32)).astype(np.float32)
        codes[:, :, 7] = largest
        values = (codes * scales[:, :, None]).reshape(64, 256)
        _, back = quantized(values, grid)
        assert np.array_equal(back, values)


@pytest.mark.parametrize("fit", ["search", "rtn"])
@pytest.mark.parametrize(("bits", "group", "symmetric"), GRIDS)
def test_zero_groups_have_scale_one_and_codes_at_the_zero_point(bits, group, symmetric, fit):
    values = np.zeros((3, 256), np.float32)
    values[1, 1::2] = -0.0
    values[2, 130:] = 1
    grid = IntegerGrid(bits, group, symmetric, "F16")
    rows, back = quantized(values, grid, fit=fit)
    assert (rows.scales[:2] == 1).all()
    assert (rows.zeros[:2] == 1 << (bits - 1)).all()
    assert (rows.codes[:2] == rows.zeros[0, 0]).all()
    assert not back[:2].any()
    assert rows.errors.weighted <= rows.errors.weighted_nearest
    empty = quantize_rows(values[:2], grid, fit=fit)
    assert empty.errors.squared == empty.errors.norm == empty.errors.relative_rmse == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_refused_by_place(bad):
    values = matrix(20, 64)
    values[17, 33] = bad
    with pytest.raises(ValueError, match=r"row 17, column 33 holds -?(nan|inf), not a number"):
        quantize_rows(values, IntegerGrid(4, 32, True, "F16"))


def test_shapes_and_weights_that_do_not_fit_are_refused():
    grid, values = IntegerGrid(4, 32, True, "F16"), matrix(4, 48)
    with pytest.raises(ValueError, match="groups of 32 columns don't divide rows of 48"):
        quantize_rows(values, grid)
    values = matrix(4, 64)
    with pytest.raises(ValueError, match="float64"):
        quantize_rows(values.astype(np.float64), grid)
    with pytest.raises(ValueError, match=r"shape \(32,\), not \(64,\)"):
        quantize_rows(values, grid, np.ones(32, np.float32))
    for bad in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="negative or not finite"):
            quantize_rows(values, grid, np.full(64, bad, np.float32))
    with pytest.raises(ValueError, match="fit is 'best'"):
        quantize_rows(values, grid, fit="best")
    for wrong in ((3, 32, True, "F16"), (4, -1, True, "F16"), (4, 32, True, "F8")):
        with pytest.raises(ValueError, match="there is no IntegerGrid"):
            IntegerGrid(*wrong)


@pytest.mark.parametrize("fit", ["search", "rtn"])
def test_scales_beyond_their_dtype_are_refused(fit):
    values = np.full((2, 32), 65504 * 8, np.float32)
    with pytest.raises(ScaleRangeError, match=r"69870\.9, more than F16 can hold"):
        quantize_rows(values, IntegerGrid(4, 32, True, "F16"), fit=fit)
    quantized(values, IntegerGrid(4, 32, True, "BF16"), fit=fit)
    values[0, 0], values[0, 1] = 3e38, -3e38
    quantized(values, IntegerGrid(4, 32, True, "F32"), fit=fit)
    with pytest.raises(ScaleRangeError, match="more than F32"):
        quantize_rows(values, IntegerGrid(4, 32, False, "F32"), fit=fit)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("exponent", [-149, -140, -130, -30, -24, -20, -16])
def test_tiny_values_get_the_nearest_scales_that_there_are(exponent, symmetric, dtype):
    values = (np.arange(-32, 32).reshape(2, 32) * 2.0**exponent).astype(np.float32)
    grid = IntegerGrid(4, 32, symmetric, dtype)
    smallest = {"F16": 2.0**-24, "BF16": 2.0**-133, "F32": 2.0**-149}[dtype]
    rows, back = quantized(values, grid)
    _, nearest = quantized(values, grid, fit="rtn")
    assert (abs(rows.scales) >= smallest).all()
    # Squares of such errors vanish in float32, but not after a change of the unit.
    exact, ours, theirs = (
        result.astype(np.float64) * 2.0**-exponent for result in (values, back, nearest)
    )
    assert ((exact - ours) ** 2).sum() <= ((exact - theirs) ** 2).sum()
    assert abs(values - back).max() <= max(np.abs(values).max() / 7, smallest / 2)


def test_importance_of_any_size_guides_the_search():
    values, grid = matrix(16, 128, seed=5), IntegerGrid(4, 32, False, "F16")
    weights = importance(128)
    expected = quantize_rows(values, grid, weights)
    for factor in (2.0**-100, 2.0**90):
        scaled = quantize_rows(values, grid, (weights * factor).astype(np.float32))
        assert np.array_equal(scaled.codes, expected.codes)
        assert scaled.errors.weighted == pytest.approx(expected.errors.weighted * factor, rel=1e-9)
    none = quantize_rows(values, grid, np.zeros(128, np.float32))
    assert np.array_equal(none.codes, quantize_rows(values, grid).codes)
    assert none.errors.weighted == none.errors.weighted_nearest == 0 < none.errors.squared
    single = np.zeros(128, np.float32)
    single[[3, 40, 70, 101]] = 1
    rows, back = quantized(values, grid, single)
    _, nearest = quantized(values, grid, single, fit="rtn")
    assert (abs(values - back)[:, 3] <= abs(values - nearest)[:, 3] * 1.0001).all()
    assert rows.errors.weighted < rows.errors.weighted_nearest / 10


def test_weights_by_square_protect_large_values():
    values, grid = matrix(32, 256, seed=6), IntegerGrid(4, 128, False, "F16")
    rows, back = quantized(values, grid, by_square=True)
    squares = values.astype(np.float64) ** 2
    _, plain = quantized(values, grid)
    _, nearest = quantized(values, grid, fit="rtn")
    error, other = (weighted_error(values, result, squares) for result in (back, plain))
    assert error < other
    assert rows.errors.weighted == pytest.approx(error, rel=1e-5)
    assert rows.errors.weighted_nearest == pytest.approx(
        weighted_error(values, nearest, squares), rel=1e-5
    )


def test_the_search_is_close_to_trying_everything():
    values = np.random.default_rng(7).standard_normal((64, 32)).astype(np.float32)
    rows = quantize_rows(values, IntegerGrid(4, 32, False, "F32"))
    low, high = values.min(1).clip(max=0), values.max(1).clip(min=0)
    best = np.full(64, np.inf)
    for factor in np.linspace(0.5, 1.1, 121):
        scales = ((high - low) / 15 * factor)[:, None]
        for zero in range(16):
            codes = np.clip(np.rint(values / scales) + zero, 0, 15) - zero
            used = (codes**2).sum(1) > 0
            sums = (values * codes).sum(1)[used] ** 2 / (codes**2).sum(1)[used]
            best[used] = np.minimum(best[used], (values**2).sum(1)[used] - sums)
    assert rows.errors.squared < best.sum() * 1.02


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 35),
    groups=st.integers(1, 5),
    group=st.sampled_from([1, 8, 24, 32, 130, 300]),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(["F16", "BF16", "F32"]),
    magnitude=st.integers(-30, 10),
    weighted=st.booleans(),
)
def test_any_shape_and_magnitude(
    seed, rows, groups, group, bits, symmetric, dtype, magnitude, weighted
):
    rng = np.random.default_rng(seed)
    shape = rows, groups * group
    values = rng.standard_normal(shape) * np.exp(rng.normal(0, 2, shape)) * 2.0**magnitude
    values = values.astype(np.float32).clip(-1e5, 1e5)  # F16 can hold the scales of these
    weights = importance(shape[1], seed) if weighted else None
    grid = IntegerGrid(bits, group, symmetric, dtype)
    result, back = quantized(values, grid, weights)
    _, nearest = quantized(values, grid, weights, fit="rtn")
    assert weighted_error(values, back, weights) <= weighted_error(values, nearest, weights)
    assert result.errors.squared == pytest.approx(weighted_error(values, back, None), rel=1e-4)
