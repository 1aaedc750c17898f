"""Rules that read values: each fires on a checkpoint with one kind of wrong values."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import gguf2st
from gguf2st.verification import reading
from gguf2st.verification.header import Tensor, read_header
from tests.verification.editing import Edit, base, opened


def not_a_number(edit: Edit) -> None:
    edit.tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")


def zero_scales(edit: Edit) -> None:
    edit.tensors["model.layers.1.mlp.down_proj.weight_scale"].zero_()


def small_scales(edit: Edit) -> None:
    """As of weights that were quantized with a tenth of the scales they need."""
    module = "model.layers.1.mlp.down_proj"
    edit.dequantize(module)
    weight = edit.tensors[f"{module}.weight"].clone()
    edit.pack(module)
    scale = edit.tensors[f"{module}.weight_scale"] / 10
    codes = (weight.float().reshape(256, -1, 32) / scale.float()[..., None]).round().clamp(-8, 7)
    edit.tensors[f"{module}.weight"] = (codes * 1.0).reshape(256, -1)
    packed = (codes.reshape(256, -1, 8).to(torch.int64) + 8) << torch.arange(0, 32, 4)
    words = packed.sum(-1)
    edit.tensors[f"{module}.weight_packed"] = torch.where(
        words >= 1 << 31, words - (1 << 32), words
    ).to(torch.int32)
    del edit.tensors[f"{module}.weight"]


def norms_with_the_one(edit: Edit) -> None:
    """As GGUF stores them."""
    for name, tensor in edit.tensors.items():
        if tensor.dim() == 1 and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor.add_(1)


def gated_norm_without_the_one(edit: Edit) -> None:
    for name in edit.names("linear_attn.norm.weight"):
        edit.tensors[name] -= 1


def decays_as_in_gguf(edit: Edit) -> None:
    for name in edit.names("A_log"):
        edit.tensors[name] = -(torch.linspace(-2, 2.7, len(edit.tensors[name])).exp())


def another_global_scale(edit: Edit) -> None:
    edit.tensors["model.layers.0.self_attn.q_proj.weight_global_scale"] *= 2


def negative_global_scales(edit: Edit) -> None:
    for name in edit.names("layers.0.self_attn.", "weight_global_scale"):
        edit.tensors[name] *= -1


def another_head(edit: Edit) -> None:
    edit.config["tie_word_embeddings"] = True


CASES: list[tuple[str, tuple[str, str], Callable[[Edit], None]]] = [
    ("V-01", ("llama", "bf16"), not_a_number),
    ("V-02", ("llama", "ct"), zero_scales),
    ("V-02", ("llama", "nvfp4"), negative_global_scales),
    ("V-03", ("llama", "ct"), small_scales),
    ("V-04", ("llama", "bf16"), another_head),
    ("D-14", ("llama", "nvfp4"), another_global_scale),
    ("D-42", ("qwen35", "bf16"), norms_with_the_one),
    ("D-42", ("qwen35", "bf16"), gated_norm_without_the_one),
    ("D-42", ("qwen35", "bf16"), decays_as_in_gguf),
]


@pytest.mark.parametrize(
    ("rule", "made", "change"), CASES, ids=lambda x: getattr(x, "__name__", "")
)
def test_rule(
    rule: str, made: tuple[str, str], change: Callable[[Edit], None], tmp_path: Path
) -> None:
    source = base(*made)
    assert not gguf2st.verify(source, deep=True).of(rule)
    edit = opened(source)
    change(edit)
    directory = edit.write(tmp_path / "broken", source)
    assert gguf2st.verify(directory, deep=True).of(rule)
    assert not gguf2st.verify(directory).of(rule)  # headers don't tell


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_floats_as_torch_reads_them(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every code of one or two bytes, in chunks smaller than the tensor."""
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    codes = np.arange(1 << 8 * min(size, 2), dtype="<u2" if size > 1 else "u1")
    if size == 4:
        codes = codes.astype("<u4") << 16
    values = torch.frombuffer(bytearray(codes.tobytes()), dtype=kind)
    save_file({"x": values}, tmp_path / "x.safetensors")
    monkeypatch.setattr(reading, "CHUNK_BYTES", 100)
    tensor: Tensor = read_header(tmp_path / "x.safetensors").tensors["x"]
    read = np.concatenate(list(reading.float_chunks(tmp_path, tensor)))
    np.testing.assert_array_equal(read, values.float().numpy())


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A tensor is never held as a whole."""
    from safetensors.torch import save_file

    save_file(
        {"x": torch.zeros(40 << 20, dtype=torch.uint8).view(torch.bfloat16)},
        tmp_path / "x.safetensors",
    )
    tensor = read_header(tmp_path / "x.safetensors").tensors["x"]
    sizes = [chunk.nbytes for chunk in reading.raw_chunks(tmp_path, tensor)]
    assert sum(sizes) == tensor.nbytes and max(sizes) <= reading.CHUNK_BYTES
