"""Decoded weights are those of compressed-tensors, vLLM's, transformers' and GPTQ's own arithmetic."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gguf2st.scheme import Scheme
from gguf2st.verification import Context, open_checkpoint
from gguf2st.verification import decoding as module
from gguf2st.verification.decoding import Decoding, decoded, decoding_of, refusal
from gguf2st.verification.numbers import floats, rounded
from gguf2st.verification.stored import Layout, Stored
from tests.conversions import load
from tests.targets import decoders
from tests.verification.editing import PLAIN_CT, _words, base

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("ct", {}),
    "int4-asymmetric": ("ct", {"symmetric": False, "group_size": 32}),
    "int8": ("ct", {"bits": 8}),
    "int8-channel": ("ct", {"bits": 8, "group_size": 0}),
    "awq": ("awq", {"group_size": 64}),
    "gptq": ("gptq", {}),
    "gptq-int8": ("gptq", {"bits": 8, "group_size": 32}),
    "fp8": ("fp8", {}),
    "fp8-blocks": ("fp8", {"variant": "block"}),
    "w8a8": ("w8a8", {}),
    "nvfp4": ("nvfp4", {}),
    "mxfp4": ("mxfp4", {}),
}
# Of a model whose matrices aren't all of one size; more than one chunk of rows each.
FIXTURE = "llama"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_WEIGHTS", 1)


def matrices(directory: Path) -> tuple[Context, dict[str, Stored]]:
    from gguf2st.engines.base import Deployment

    context = Context(open_checkpoint(directory), {}, Deployment())
    return context, dict(context.quantized)


def all_rows(directory: Path, matrix: Stored, settings: Decoding) -> np.ndarray:
    assert not refusal(matrix, settings)
    return np.concatenate(list(decoded(directory, matrix, settings)))


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to, options = FORMATS[name]
    directory = base(FIXTURE, to, **options)
    written = load(directory)
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    context, found = matrices(directory)
    assert len(found) == 14
    for matrix in found.values():
        ours = all_rows(directory, matrix, decoding_of(context.view.quantization))
        theirs = decoders.module(written, matrix.name, config, monkeypatch)
        # compressed-tensors rounds the scales of 4-bit floats to bfloat16 before it multiplies.
        dtype = torch.bfloat16 if "fp4" in name else torch.float32
        one, other = (torch.from_numpy(np.array(w)).to(dtype) for w in (ours, theirs))
        assert torch.equal(one, other), matrix.name


def written(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Stored:
    """A checkpoint of one matrix."""
    save_file(
        {f"m.{leaf}": t.contiguous() for leaf, t in tensors.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return matrices(directory)[1]["m"]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", [True, False])
def test_gptq(version: str, bits: int, order: bool, tmp_path: Path) -> None:
    """Zero points of any value, groups in any order; the weights are made before they are packed."""
    out, columns, groups = 256, 128, 4
    seed = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 1 << bits, (columns, out), generator=seed)
    zeros = torch.randint(1, 1 << bits, (groups, out), generator=seed)
    scales = (torch.rand(groups, out, generator=seed) + 0.1).half()
    group = torch.arange(columns) // (columns // groups)
    if order:
        group = group[torch.randperm(columns, generator=seed)]
    weights = ((codes - zeros[group]).float() * scales.float()[group]).T
    tensors = {
        "qweight": _words(codes.T, bits).T,
        "qzeros": _words(zeros - int(version == "gptq"), bits),
        "scales": scales,
        "g_idx": group.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    matrix = written(tmp_path, config | {"sym": False, "desc_act": order}, tensors)
    assert matrix.layout is Layout.GPTQ
    settings = decoding_of(matrices(tmp_path)[0].view.quantization)
    assert torch.equal(torch.from_numpy(all_rows(tmp_path, matrix, settings)), weights)


@pytest.mark.parametrize("form", ["tensor", "row", "group", "zero points"])
def test_eight_bits(form: str, tmp_path: Path) -> None:
    """Scales of each shape that compressed-tensors' int-quantized has."""
    seed = torch.Generator().manual_seed(4)
    codes = torch.randint(-128, 128, (384, 64), generator=seed).to(torch.int8)
    shape = {"tensor": (1,), "group": (384, 2)}.get(form, (384, 1))
    tensors = {"weight": codes, "weight_scale": torch.rand(shape, generator=seed).bfloat16()}
    scale = tensors["weight_scale"].float()
    values = codes.float()
    if form == "zero points":
        tensors["weight_zero_point"] = torch.randint(-9, 9, (384, 1), generator=seed).to(torch.int8)
        values -= tensors["weight_zero_point"].float()
    factors = scale.repeat_interleave(32, 1) if form == "group" else scale
    matrix = written(tmp_path, {"quant_method": "compressed-tensors"}, tensors)
    assert torch.equal(torch.from_numpy(all_rows(tmp_path, matrix, Decoding())), values * factors)


def modelopt(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """NVFP4 as ModelOpt writes it; packed by compressed-tensors."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    blocks = weight.view(len(weight), -1, 16)
    shared = weight.abs().max() / (6 * 448)
    scale = (blocks.abs().amax(2) / 6 / shared).to(torch.float8_e4m3fn)
    levels = blocks / (scale.float() * shared)[..., None]
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = grid[(levels.abs()[..., None] - grid).abs().argmin(-1)] * levels.sign()
    return {
        "weight": pack_fp4_to_uint8(nearest.reshape(weight.shape)),
        "weight_scale": scale,
        "weight_scale_2": shared,
        "input_scale": torch.tensor(0.01),
    }


def test_modelopt(tmp_path: Path) -> None:
    """Against what vLLM computes with where there is no hardware for it."""
    reference = pytest.importorskip(
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"
    )
    weight = torch.randn(384, 96, generator=torch.Generator().manual_seed(6))
    tensors = modelopt(weight)
    matrix = written(tmp_path, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors)
    assert matrix.layout is Layout.MODELOPT and matrix.shape == (384, 96)
    assert matrix.scheme == Scheme("nvfp4", 4, 16)
    found = torch.from_numpy(all_rows(tmp_path, matrix, Decoding()))
    expected = reference.dequantize_to_dtype(
        tensors["weight"],
        tensors["weight_scale"],
        tensors["weight_scale_2"],
        torch.float32,
        swizzle=False,
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert (found - weight).square().mean() < 0.02 * weight.square().mean()


def test_ragged_blocks(tmp_path: Path) -> None:
    """The last block of rows and of columns may be smaller."""
    seed = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 200, generator=seed).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=seed)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    matrix = written(tmp_path, config, {"weight": weight, "weight_scale_inv": scale})
    blocks = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    settings = decoding_of(matrices(tmp_path)[0].view.quantization)
    found = torch.from_numpy(all_rows(tmp_path, matrix, settings))
    assert torch.equal(found, weight.float() * blocks)


def test_memory_does_not_grow_with_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 512 KiB of float32 at a time, with its temporary copies; the matrix has 64 MiB."""
    monkeypatch.setattr(module, "CHUNK_WEIGHTS", 1 << 17)
    tensors = {
        "weight_packed": torch.zeros(16384, 128, dtype=torch.int32),
        "weight_scale": torch.ones(16384, 8, dtype=torch.bfloat16),
    }
    matrix = written(tmp_path, PLAIN_CT, tensors)
    tracemalloc.start()
    count = sum(len(rows) for rows in decoded(tmp_path, matrix, Decoding()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 16384 and peak < 8 << 20


def test_what_cant_be_decoded() -> None:
    scheme = Scheme("int", 4, 32)
    leaves: dict[str, Any] = {"weight_packed": None, "weight_scale": None, "weight_g_idx": None}
    assert "weight_g_idx" in refusal(Stored("m", Layout.PACKED, leaves, (8, 8), scheme), Decoding())
    bare: dict[str, Any] = {"qweight": None, "scales": None}
    awq = Stored("m", Layout.AWQ, bare, (8, 8), scheme)
    assert "qzeros" in refusal(awq, Decoding())
    assert not refusal(awq, Decoding(symmetric=True))
    three = Stored("m", Layout.GPTQ, {**bare, "qzeros": None}, (8, 8), Scheme("int", 3, 32))  # type: ignore[dict-item]
    assert "3 bits" in refusal(three, Decoding())
    assert "can't be decoded" in refusal(Stored("m", Layout.BROKEN, {}), Decoding())


def test_every_float_of_eight_bits() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        theirs = codes.view(dtype).float().numpy()
        np.testing.assert_array_equal(floats(codes.numpy(), name), theirs)
    scales = codes[:255].view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(floats(codes[:255].numpy(), "F8_E8M0"), scales)


def test_rounding() -> None:
    """Of halves the even one, infinities and NaN as they are."""
    seed = torch.Generator().manual_seed(6)
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=seed).to(torch.int32)
    ties = (torch.arange(1 << 16, dtype=torch.int64) << 16 | 0x8000).to(torch.int32)
    values = torch.cat((bits, ties)).view(torch.float32)
    finite = values[values.isfinite()]
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        ours = rounded(finite.numpy(), name).view(np.uint16)
        np.testing.assert_array_equal(ours, finite.to(dtype).view(torch.uint16).numpy())
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(floats(rounded(special, "BF16"), "BF16"), special)
