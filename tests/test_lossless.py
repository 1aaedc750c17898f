"""Types that lie on an integer grid keep their values; the report says so, and says what doesn't."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gguf2st
from gguf2st.gguf.blocks.registry import block_type_by_name
from gguf2st.quantize import IntegerGrid, dequantize_rows, exact_rows
from gguf2st.targets.lossless import LAYOUTS
from tests.blocks.samples import sound_bytes
from tests.conversions import Case, converted, importance, load
from tests.oracles import ggml
from tests.targets import decoders

BLOCKS = Path(__file__).parent.parent / "fixtures" / "blocks"
# What a type becomes, and whether its scales fit float16 (others are rounded once, by 2^-11).
TYPES = {
    "Q4_0": ("int4 g32", True),
    "TQ1_0": ("int4 g128", True),
    "TQ2_0": ("int4 g128", True),
    "Q1_0": ("int4 g128", True),
    "Q2_0": ("int4 g64", True),
    "Q8_0": ("int8 g32", True),
    "IQ4_NL": ("int8 g32", True),
    "IQ3_XXS": ("int8 g32", False),
    "IQ1_S": ("int8 g32", False),
}


@pytest.mark.parametrize("name", TYPES)
def test_values_stay(name: str, tmp_path: Path) -> None:
    scheme, exact = TYPES[name]
    gguf = BLOCKS / f"blocks-{name}.gguf"
    report = gguf2st.convert(gguf, tmp_path / "out", to="lossless")
    gguf2st.convert(gguf, tmp_path / "plain", to="f32")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    modules = [module for module in report.modules if module.source == name]
    assert modules
    for module in modules:
        assert module.scheme == scheme
        assert module.exact == exact
        parts = decoders.module_tensors(written, module.name)
        parts["weight_scale"] = parts["weight_scale"].float()  # products have more than 11 bits
        decoded = decoders.compressed_tensors(parts, config, module.name)
        wanted = plain[f"{module.name}.weight"].numpy()
        if exact:
            assert np.array_equal(decoded, wanted)
            assert module.largest_change == 0
        else:
            changes = np.abs(decoded - wanted)[wanted != 0] / np.abs(wanted[wanted != 0])
            assert np.isclose(changes.max(), module.largest_change, rtol=1e-3)
            assert changes.max() <= 2**-11
            assert not decoded[wanted == 0].any()
    whole = {name: tensor.float() for name, tensor in written.items() if name in plain}
    assert set(report.rounded) == {n for n, t in whole.items() if not torch.equal(t, plain[n])}
    for tensor in report.rounded:
        torch.testing.assert_close(whole[tensor], plain[tensor], rtol=2**-11, atol=2**-25)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name][0].kind == "int"])
def test_any_block_of_a_type_lies_on_its_grids(name: str) -> None:
    """Random bytes under sound scales, decoded by ggml's reference."""
    kind = block_type_by_name(name)
    raw = sound_bytes(kind, 64, seed=5)
    if name == "MXFP4":
        raw[:, 0] = 110 + raw[:, 0] % 16  # exponents within float16's, as real weights have them
    values = ggml.dequantize(name, raw.tobytes(), 64 * kind.block_size).reshape(8, -1)
    for scheme in LAYOUTS[name]:
        rows = exact_rows(values, IntegerGrid(scheme.bits, scheme.group_size, True, "F16"))
        assert rows is not None
        grid = IntegerGrid(scheme.bits, scheme.group_size, True, "F16")
        np.testing.assert_allclose(dequantize_rows(rows, grid), values, rtol=2**-11, atol=1e-9)


def test_what_lies_on_no_grid_is_kept(tmp_path: Path) -> None:
    fixture = BLOCKS.parent / "qwen3moe" / "qwen3moe-Q4_K_M.gguf"
    with pytest.raises(gguf2st.UnsupportedError, match=r"Q4_K.* lie on no grid.*take --to bf16"):
        gguf2st.convert(fixture, tmp_path / "out", to="lossless")


@pytest.mark.parametrize("name", ["Q4_0", "TQ1_0", "Q2_0"])
def test_an_importance_matrix_leaves_what_is_exact(name: str, tmp_path: Path) -> None:
    """Formats of one layout don't scale what lies on its grid, whatever is measured of activations."""
    gguf = BLOCKS / f"blocks-{name}.gguf"
    target = gguf2st.TargetOptions(group_size=32, dtype="f16")
    given = importance(gguf2st.open_model(gguf), spread=1)
    report = gguf2st.convert(gguf, tmp_path / "out", to="ct", importance=given, target=target)
    assert all(module.measured for module in report.modules)
    plain = load(converted(Case(gguf), "f32"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    # Ternary values become codes -7, 0 and 7 of a scale that float16 doesn't always hold.
    tolerance = 0 if name == "Q4_0" else 2**-11
    for module in report.modules:
        parts = decoders.module_tensors(written, module.name)
        parts["weight_scale"] = parts["weight_scale"].float()  # products have more than 11 bits
        decoded = decoders.compressed_tensors(parts, config, module.name)
        wanted = plain[f"{module.name}.weight"].numpy()
        np.testing.assert_allclose(decoded, wanted, rtol=tolerance, atol=0)


def test_nothing_is_scaled(tmp_path: Path) -> None:
    """Scaled activations would move the values off their grids."""
    gguf = BLOCKS / "blocks-Q4_0.gguf"
    given = {"blk.0.ffn_up.weight": np.ones(256, np.float32)}
    with pytest.raises(gguf2st.UsageError, match="of no use to lossless"):
        gguf2st.convert(gguf, tmp_path / "out", to="lossless", importance=given, smoothing=0.5)


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 128), (8, 32)])
def test_random_codes_come_back(bits: int, size: int) -> None:
    random = np.random.default_rng(bits + size)
    half = 1 << (bits - 1)
    codes = random.integers(-half, half, (5, 512))
    scales = random.normal(0, 0.05, (5, 512 // size)).astype(np.float16).astype(np.float32)
    scales[1, 0] = 0  # a group of zeros
    values = (codes * scales.repeat(size, axis=1)).astype(np.float32)
    grid = IntegerGrid(bits, size, True, "F16")
    rows = exact_rows(values, grid)
    assert rows is not None
    assert np.array_equal(dequantize_rows(rows, grid), values)
    assert rows.errors.squared == 0
    values[3, 7] += np.float32(0.37) * abs(scales[3, 0])
    assert exact_rows(values, grid) is None


def test_units_beyond_float16_are_no_exact_fit() -> None:
    values = np.full((1, 32), 1e6, np.float32)
    assert exact_rows(values, IntegerGrid(4, 32, True, "F16")) is None
    values = torch.full((1, 32), 2.0**-30).numpy()
    assert exact_rows(values, IntegerGrid(4, 32, True, "F16")) is None
