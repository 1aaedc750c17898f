"""Every layout, written by us and read by others, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gguf2st import quantize
from gguf2st.targets import EncodeContext, Scheme, Target, TargetOptions, target_named
from tests.targets import decoders
from tests.targets.helpers import (
    Values,
    chunkings,
    error,
    importance,
    matrix,
    module,
    same_bytes,
    written,
)

BITS_ERROR = {4: 0.35, 8: 0.05}


def integers(values: Values, scheme: Scheme, dtype: str, weights: Values | None) -> Values:
    """What the codes stand for: (code - zero) * scale in float32."""
    grid = quantize.IntegerGrid(scheme.bits, scheme.group_size, scheme.symmetric, dtype)
    # Long groups are fitted by squares where nothing says which columns matter.
    by_square = weights is None and scheme.group_size != 32
    rows = quantize.quantize_rows(values, grid, weights, "search", by_square=by_square)
    size = values.shape[1] // rows.scales.shape[1]
    codes = rows.codes.astype(np.int32) - np.repeat(rows.zeros, size, 1).astype(np.int32)
    return codes.astype(np.float32) * np.repeat(rows.scales, size, 1)


def run(
    target: Target, scheme: Scheme, shape: tuple[int, int], name: str, *, weighted: bool
) -> tuple[Values, Values | None, dict[str, torch.Tensor], EncodeContext]:
    """Encode in several chunkings; all must give the same bytes."""
    item, values = module(*shape, scheme, name), matrix(*shape)
    weights = importance(shape[1]) if weighted else None
    assert target.refusal(shape, scheme) is None
    context = EncodeContext(weights, float(np.abs(values).max()))
    multiple = target.encoder(item, context).row_multiple
    results = [
        written(target, item, values, context, rows) for rows in chunkings(shape[0], multiple)
    ]
    assert all(same_bytes(results[0], other) for other in results[1:])
    return values, weights, results[0], context


def compare(
    target: Target, scheme: Scheme, values: Values, context: EncodeContext, decoded: Values
) -> None:
    """What was decoded is near the weights, and as near as the encoder says."""
    found = error(values, decoded)
    assert found < BITS_ERROR[scheme.bits if scheme.kind != "fp8" else 4]
    encoder = target.encoder(module(*values.shape, scheme), context)
    list(encoder.encode(0, values))
    list(encoder.finish())
    assert encoder.errors.relative_rmse == pytest.approx(found, rel=1e-3)


DOWN = "model.layers.0.mlp.down_proj"
EXPERT = "model.layers.0.mlp.experts.3.down_proj"
CT = [
    (bits, group, symmetric, dtype, shape)
    for bits in (4, 8)
    for group, shapes in {
        128: [(40, 256), (3, 128)],
        64: [(24, 192)],
        32: [(37, 96)],
        0: [(40, 96), (9, 100), (5, 33)],
    }.items()
    for symmetric in (True, False)
    for dtype in ("bf16", "f16")
    for shape in shapes
]


@pytest.mark.parametrize(("bits", "group", "symmetric", "dtype", "shape"), CT)
def test_compressed_tensors(
    bits: int, group: int, symmetric: bool, dtype: str, shape: tuple[int, int]
) -> None:
    options = TargetOptions(bits, group, symmetric, dtype=dtype)
    target = target_named("ct", options)
    (scheme,) = target.schemes()
    values, weights, tensors, context = run(target, scheme, shape, DOWN, weighted=dtype == "bf16")
    config = target.quantization_config([module(*shape, scheme)], ["lm_head"])
    assert config is not None
    decoded = decoders.compressed_tensors(tensors, config)
    np.testing.assert_array_equal(decoded, integers(values, scheme, target.dtype, weights))
    assert tensors["weight_shape"].tolist() == list(shape)
    compare(target, scheme, values, context, decoded)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("group", "shape"), [(128, (40, 256)), (64, (24, 192)), (32, (8, 96))])
def test_awq(
    group: int,
    shape: tuple[int, int],
    symmetric: bool,
    weighted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = target_named("awq", TargetOptions(None, group, symmetric))
    (scheme,) = target.schemes()
    values, weights, tensors, context = run(target, scheme, shape, DOWN, weighted=weighted)
    decoded = decoders.awq(tensors, monkeypatch)
    np.testing.assert_array_equal(decoded, integers(values, scheme, "F16", weights))
    if symmetric:
        assert (tensors["qzeros"] == -0x77777778).all()  # eight nibbles of 8
    compare(target, scheme, values, context, decoded)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("group", "shape"), [(128, (40, 256)), (64, (24, 192)), (32, (8, 96)), (0, (16, 96))]
)
def test_gptq(group: int, shape: tuple[int, int], bits: int) -> None:
    target = target_named("gptq", TargetOptions(bits, group))
    (scheme,) = target.schemes()
    values, weights, tensors, context = run(target, scheme, shape, DOWN, weighted=bits == 4)
    decoded = decoders.gptq(tensors, bits)
    np.testing.assert_array_equal(decoded, integers(values, scheme, "F16", weights))
    compare(target, scheme, values, context, decoded)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape", [(40, 96), (7, 33)])
def test_w8a8(shape: tuple[int, int], dtype: str) -> None:
    target = target_named("w8a8", TargetOptions(dtype=dtype))
    (scheme,) = target.schemes()
    values, weights, tensors, context = run(target, scheme, shape, DOWN, weighted=dtype == "f16")
    config = target.quantization_config([module(*shape, scheme)], [])
    assert config is not None
    decoded = decoders.compressed_tensors(tensors, config)
    np.testing.assert_array_equal(decoded, integers(values, scheme, target.dtype, weights))
    compare(target, scheme, values, context, decoded)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape", [(40, 96), (7, 33)])
def test_fp8_channel(shape: tuple[int, int], dtype: str) -> None:
    target = target_named("fp8", TargetOptions(dtype=dtype))
    (scheme,) = target.schemes()
    values, weights, tensors, context = run(target, scheme, shape, DOWN, weighted=dtype == "f16")
    config = target.quantization_config([module(*shape, scheme)], [])
    assert config is not None
    decoded = decoders.compressed_tensors(tensors, config)
    rows = quantize.quantize_fp8_rows(values, target.dtype, weights, "search")
    np.testing.assert_array_equal(decoded, e4m3(rows.codes) * rows.scales)
    compare(target, scheme, values, context, decoded)


@pytest.mark.parametrize(("name", "variant"), [("fp8", "block"), ("w4afp8", None)])
@pytest.mark.parametrize("shape", [(384, 256), (128, 384)])
def test_fp8_blocks(shape: tuple[int, int], name: str, variant: str | None) -> None:
    target = target_named(name, TargetOptions(variant=variant))
    (scheme,) = target.schemes_for(DOWN)
    values, weights, tensors, context = run(target, scheme, shape, DOWN, weighted=False)
    decoded = decoders.fp8_blocks(tensors)
    rows = quantize.quantize_fp8_blocks(values, weights, "search")
    scales = rows.scales.repeat(128, 0).repeat(128, 1)
    np.testing.assert_array_equal(decoded, e4m3(rows.codes) * scales)
    compare(target, scheme, values, context, decoded)


@pytest.mark.parametrize("shape", [(40, 96), (7, 32)])
def test_mxfp4(shape: tuple[int, int]) -> None:
    target = target_named("mxfp4")
    (scheme,) = target.schemes()
    values, weights, tensors, context = run(target, scheme, shape, DOWN, weighted=True)
    config = target.quantization_config([module(*shape, scheme)], [])
    assert config is not None
    rows = quantize.quantize_mxfp4(values, weights, "search")
    scales = np.exp2(rows.scales.astype(np.float32) - 127)
    decoded = decoders.compressed_tensors(tensors, config)
    np.testing.assert_array_equal(decoded, e2m1(rows.codes) * scales.repeat(32, 1))
    compare(target, scheme, values, context, decoded)


@pytest.mark.parametrize("shape", [(40, 96), (7, 16)])
def test_nvfp4(shape: tuple[int, int]) -> None:
    target = target_named("nvfp4")
    (scheme,) = target.schemes()
    assert scheme.needs_maximum
    values, weights, tensors, context = run(target, scheme, shape, DOWN, weighted=True)
    config = target.quantization_config([module(*shape, scheme)], [])
    assert config is not None
    whole = quantize.nvfp4_global_scale(context.group_maximum)
    assert float(tensors["weight_global_scale"]) == np.float32(whole)
    rows = quantize.quantize_nvfp4(values, whole, weights, "search")
    scales = e4m3(rows.scales) / np.float32(whole)
    expected = torch.from_numpy(e2m1(rows.codes) * scales.repeat(16, 1))
    # compressed-tensors' decompressor rounds to bfloat16 at the end (not with a single group).
    decoded = torch.from_numpy(decoders.compressed_tensors(tensors, config))
    assert torch.equal(decoded.bfloat16(), expected.bfloat16())
    compare(target, scheme, values, context, expected.numpy())


@pytest.mark.parametrize("shape", [(40, 256), (16, 128)])
def test_w4afp8_expert(shape: tuple[int, int]) -> None:
    target = target_named("w4afp8")
    (scheme,) = target.schemes_for(EXPERT)
    values, weights, tensors, context = run(target, scheme, shape, EXPERT, weighted=True)
    decoded = decoders.w4afp8_expert(tensors)
    np.testing.assert_array_equal(decoded, integers(values, scheme, "BF16", weights))
    compare(target, scheme, values, context, decoded)


@pytest.mark.parametrize(
    ("name", "options", "shape", "reason"),
    [
        ("awq", {}, (12, 128), "12 rows can't be divided into words of 8"),
        ("awq", {}, (16, 96), "96 columns can't be divided into groups of 128"),
        ("gptq", {}, (12, 128), "12 rows can't be divided into words of 8"),
        ("gptq", {"group_size": 0}, (16, 100), "100 columns can't be divided into words of 8"),
        ("gptq", {"bits": 8}, (6, 128), "6 rows can't be divided into words of 4"),
        ("ct", {"group_size": 32}, (16, 100), "100 columns can't be divided into groups of 32"),
        ("mxfp4", {}, (16, 48), "48 columns can't be divided into groups of 32"),
        ("nvfp4", {}, (16, 40), "40 columns can't be divided into groups of 16"),
        ("fp8", {"variant": "block"}, (96, 128), "96 rows can't be divided into blocks of 128"),
        ("fp8", {"variant": "block"}, (128, 96), "96 columns can't be divided into blocks of 128"),
        ("w4afp8", {}, (16, 96), "96 columns can't be divided into groups of 128"),
    ],
)
def test_refusals(name: str, options: dict[str, int], shape: tuple[int, int], reason: str) -> None:
    target = target_named(name, TargetOptions(**options))  # type: ignore[arg-type]
    assert target.refusal(shape, target.schemes()[0]) == reason


def e4m3(codes: np.ndarray) -> Values:
    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()


def e2m1(codes: np.ndarray) -> Values:
    """1 sign, 2 exponent and 1 mantissa bits."""
    sign, exponent, mantissa = codes >> 3, (codes >> 1 & 3).astype(int), codes & 1
    size = np.where(exponent, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2)
    return (size * np.where(sign, -1, 1)).astype(np.float32)
