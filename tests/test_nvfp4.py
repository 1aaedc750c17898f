"""NVFP4 blocks of a GGUF keep their codes and scales: the checkpoint stands for the very same numbers.

On one side ggml decodes the blocks and a second implementation undoes llama.cpp's converter; on the
other, codes are unpacked by compressed-tensors and multiplied as engines do it: code * scale * (1 / global).
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from safetensors.torch import load_file

import gguf2st
from gguf2st.errors import InputError
from gguf2st.quantize.floating import nvfp4_global_scale_of
from tests.oracles import ggml, inverse
from tests.oracles.gguf_rewrite import Tensor, quantize, requantize_to_f32, rewrite, rewrite_all
from tests.oracles.originals import original_state_dict
from tests.targets import decoders
from tests.test_requantize import plain_matrix

FIXTURES = Path(__file__).parent.parent / "fixtures"
DENSE = FIXTURES / "qwen3-small-nvfp4" / "qwen3-small-nvfp4.gguf"
EXPERTS = FIXTURES / "qwen3moe-small-nvfp4" / "qwen3moe-small-nvfp4.gguf"
JOINED = {"attn_k": "attn_q", "attn_v": "attn_q", "ffn_up": "ffn_gate"}
JOINED |= {
    "ffn_up_exps": "ffn_gate_exps",
    "attn_gate": "attn_qkv",
    "ffn_up_shexp": "ffn_gate_shexp",
}
_F32 = 0  # enum ggml_type
Tensors = dict[str, torch.Tensor]


def decoded(written: Tensors, name: str) -> np.ndarray:
    """A module's weights as float32 (out, in)."""
    packed = written[f"{name}.weight_packed"]
    rows, half = packed.shape
    codes = unpack_fp4_from_uint8(packed, rows, 2 * half, dtype=torch.float32)
    scales = written[f"{name}.weight_scale"].float().repeat_interleave(16, 1)
    return (codes * scales * (1 / written[f"{name}.weight_global_scale"])).numpy()


def with_factors(source: Path, target: Path, factor_of: Callable[[str], np.ndarray]) -> Path:
    """The model with other factors of its NVFP4 tensors; those that engines join have the same."""

    def change(tensors: list[Tensor]) -> list[Tensor]:
        nvfp4 = ggml.codes()["NVFP4"]
        kept = [tensor for tensor in tensors if not tensor.name.endswith(".scale")]
        for tensor in [t for t in kept if t.code == nvfp4 and t.name.startswith("blk.")]:
            stem = tensor.name.removesuffix(".weight")
            block, kind = stem.rsplit(".", 1)
            count = tensor.shape[2] if len(tensor.shape) > 2 else 1
            factors = factor_of(f"{block}.{JOINED.get(kind, kind)}")[:count].astype("<f4")
            if len(factors):
                kept.append(Tensor(f"{stem}.scale", (count,), _F32, factors.tobytes()))
        return kept

    rewrite_all(source, target, change)
    return target


def ones(_: str) -> np.ndarray:
    """What a file without such tensors has; it doesn't get any here, either."""
    return np.ones(0)


def powers(name: str) -> np.ndarray:
    """Powers of two, another for each expert."""
    return np.ldexp(1.0, -6 - (np.arange(16) + len(name)) % 5)


def reciprocals(name: str) -> np.ndarray:
    """What llama.cpp's converter makes of any global scales that compressed-tensors wrote."""
    random = np.random.default_rng(len(name) * 31 + ord(name[4]))
    return np.float32(1) / random.uniform(300, 90_000, 16).astype(np.float32)


def requantized(fixture: str, directory: Path) -> Path:
    """A fixture with all of its matrices in NVFP4, without factors."""
    (source,) = FIXTURES.glob(f"{fixture}/{fixture}-Q*.gguf")
    requantize_to_f32(source, directory / "f32.gguf")
    quantize(directory / "f32.gguf", directory / "nvfp4.gguf", "NVFP4")
    return directory / "nvfp4.gguf"


@pytest.mark.parametrize("factors", [ones, powers, reciprocals])
@pytest.mark.parametrize(
    "fixture", ["qwen3-small-nvfp4", "qwen3moe-small-nvfp4", "llama", "qwen35", "mixtral"]
)
def test_values_stay(fixture: str, factors: Callable[[str], np.ndarray], tmp_path: Path) -> None:
    """Rows of q and k move in llama, blocks of columns and rows in qwen35; experts are stacked."""
    gguf = FIXTURES / fixture / f"{fixture}.gguf"
    if not gguf.exists():
        gguf = requantized(fixture, tmp_path)
    gguf = with_factors(gguf, tmp_path / "factors.gguf", factors)
    report = gguf2st.convert(gguf, tmp_path / "out", to="nvfp4", engines=("vllm",))
    assert {module.source for module in report.modules} == {"NVFP4"}
    assert all(module.exact and module.relative_rmse == 0 for module in report.modules)
    assert not any("quantized again" in warning for warning in report.warnings)
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = inverse.checkpoint(gguf)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    for module in report.modules:
        wanted = plain_matrix(expected, module.name)
        assert np.array_equal(decoded(written, module.name), wanted), module.name
        if factors is not reciprocals:
            # It computes in bfloat16, which holds products of a code, a scale and a power of two.
            parts = decoders.module_tensors(written, module.name)
            assert np.array_equal(decoders.compressed_tensors(parts, config), wanted), module.name


def test_bytes_of_the_original_come_back(tmp_path: Path) -> None:
    """ModelOpt's codes and scales; of its factors, those whose reciprocal float32 can express."""
    gguf2st.convert(DENSE, tmp_path / "out", to="nvfp4")
    written = load_file(tmp_path / "out" / "model.safetensors")
    original = original_state_dict(DENSE.parent)
    for block in (0, 1):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            module = f"model.layers.{block}.{name}"
            assert torch.equal(written[f"{module}.weight_packed"], original[f"{module}.weight"])
            stored = (written[f"{module}.weight_scale"], original[f"{module}.weight_scale"])
            assert torch.equal(*(scales.view(torch.uint8) for scales in stored))
            factor = 1 / written[f"{module}.weight_global_scale"]
            wanted = original[f"{module}.weight_scale_2"]
            assert abs(factor - wanted) <= wanted * 2**-23


def test_partners_of_different_factors_are_quantized_again_and_the_report_says_so(
    tmp_path: Path,
) -> None:
    report = gguf2st.convert(EXPERTS, tmp_path / "out", to="nvfp4", engines=("vllm",))
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = inverse.checkpoint(EXPERTS)
    (warning,) = (w for w in report.warnings if "quantized again" in w)
    assert "nvfp4 in the GGUF already" in warning
    again = [module for module in report.modules if module.relative_rmse > 1e-6]
    assert "model.layers.0.self_attn.q_proj" in {module.name for module in again}
    assert not any("down_proj" in module.name or "o_proj" in module.name for module in again)
    # Of expert 0, gate and up have the same factor in block 0.
    assert "model.layers.0.mlp.experts.0.up_proj" not in {module.name for module in again}
    for module in report.modules:
        wanted = plain_matrix(expected, module.name)
        found = decoded(written, module.name)
        error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        assert error < (0.05 if module in again else 1e-7)
        assert error == pytest.approx(module.relative_rmse, rel=1e-3, abs=1e-8)
    for block in (0, 1):
        parts = [f"model.layers.{block}.self_attn.{part}_proj" for part in "qkv"]
        parts_of_expert = [f"model.layers.{block}.mlp.experts.1.{p}_proj" for p in ("gate", "up")]
        for joined in (parts, parts_of_expert):
            assert len({float(written[f"{n}.weight_global_scale"]) for n in joined}) == 1


def test_columns_that_move_within_blocks_are_quantized_again(tmp_path: Path) -> None:
    """A block holds 64 columns; out_proj of this model moves 32 at a time."""
    gguf = requantized("qwen35moe", tmp_path)
    report = gguf2st.convert(gguf, tmp_path / "out", to="nvfp4", engines=("vllm",))
    moved = "model.layers.0.linear_attn.out_proj"
    assert [module.name for module in report.modules if not module.exact] == [moved]
    assert any(w.startswith(moved) and "quantized again" in w for w in report.warnings)


def test_lossless_takes_the_same_layout(tmp_path: Path) -> None:
    """Beside int8 for Q8_0, each in a group of the configuration of its own."""
    gguf = with_factors(DENSE, tmp_path / "factors.gguf", powers)

    def down_in_q8_0(tensor: Tensor) -> Tensor:
        if "ffn_down.weight" not in tensor.name:
            return tensor
        values = ggml.dequantize("NVFP4", tensor.data, tensor.count)
        data = ggml.quantize("Q8_0", values.reshape(-1, tensor.shape[0]))
        return Tensor(tensor.name, tensor.shape, ggml.codes()["Q8_0"], data)

    def change(tensors: list[Tensor]) -> list[Tensor]:
        return [
            down_in_q8_0(t) for t in tensors if "ffn_down" not in t.name or "scale" not in t.name
        ]

    rewrite_all(gguf, tmp_path / "mixed.gguf", change)
    report = gguf2st.convert(tmp_path / "mixed.gguf", tmp_path / "out", to="lossless")
    assert report.schemes == {"nvfp4 g16": 12, "int8 g32": 2}
    assert all(module.exact for module in report.modules)
    written = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    expected = inverse.checkpoint(tmp_path / "mixed.gguf")
    for module in report.modules:
        parts = decoders.module_tensors(written, module.name)
        found = decoders.compressed_tensors(parts, config, module.name)
        assert np.array_equal(found, plain_matrix(expected, module.name)), module.name


def test_lossless_keeps_float16_where_partners_differ(tmp_path: Path) -> None:
    """Quantizing again would lose; so would int8 for a partner in Q8_0."""
    report = gguf2st.convert(DENSE, tmp_path / "out", to="lossless")
    quantized = {module.name.rpartition(".")[2] for module in report.modules}
    assert quantized == {"o_proj", "down_proj"}
    assert all(module.relative_rmse < 1e-7 for module in report.modules)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float16


def test_scales_that_ggml_reads_as_zero_and_beyond_e4m3(tmp_path: Path) -> None:
    def spoil(byte: int) -> Callable[[Tensor], Tensor]:
        def change(tensor: Tensor) -> Tensor:
            if tensor.name != "blk.1.ffn_down.weight":
                return tensor
            return Tensor(tensor.name, tensor.shape, tensor.code, bytes([byte]) + tensor.data[1:])

        return change

    for byte in (0, 127, 128 + 50):
        gguf = tmp_path / f"{byte}.gguf"
        rewrite(DENSE, gguf, spoil(byte))
        gguf2st.convert(gguf, tmp_path / "out", to="nvfp4", force=True)
        written = load_file(tmp_path / "out" / "model.safetensors")
        name = "model.layers.1.mlp.down_proj"
        wanted = plain_matrix(inverse.checkpoint(gguf), name)
        np.testing.assert_allclose(decoded(written, name), wanted, rtol=2**-23, atol=0)
    rewrite(DENSE, tmp_path / "broken.gguf", spoil(255))
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.down_proj .* scale of 480"):
        gguf2st.convert(tmp_path / "broken.gguf", tmp_path / "out2", to="nvfp4")


def test_global_scales_give_factors_back() -> None:
    random = np.random.default_rng(3)
    for written in np.float32(random.uniform(1e-3, 1e6, 200)):
        factor = np.float32(1) / written
        assert np.float32(1) / np.float32(nvfp4_global_scale_of(float(factor))) == factor
    for exponent in range(-20, 20):
        assert nvfp4_global_scale_of(2.0**exponent) == 2.0**-exponent
    for factor in np.float32(random.uniform(1e-6, 1, 200)):
        found = np.float32(1) / np.float32(nvfp4_global_scale_of(float(factor)))
        assert abs(found - factor) <= np.spacing(factor)
