"""Whole conversions on a device write the bytes that the CPU writes.

Without a GPU, torch's CPU device stands in for one: all is done but pinned buffers and streams.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gguf2st
from gguf2st import gpu, run
from gguf2st.errors import UsageError
from gguf2st.gpu import Gpu, open_gpu

FIXTURES = Path(__file__).parent.parent / "fixtures"
MODELS = {
    "llama": ("llama/llama-Q4_K_M.gguf", None),
    "qwen35": ("qwen35/qwen35-Q4_K_M.gguf", "qwen35/mmproj-qwen35-f16.gguf"),
    "qwen35moe": ("qwen35moe/qwen35moe-Q4_0.gguf", None),
}
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("f16", {}),
    ("f32", {}),
    ("awq", {}),
    ("gptq", {}),
    ("ct", {"symmetric": False, "group_size": 32}),
    ("fp8", {"variant": "block"}),
    ("w8a8", {}),
    ("mxfp4", {}),
    ("nvfp4", {}),
    ("lossless", {}),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a device on which everything is done, however small."""
    monkeypatch.setattr(gpu, "SMALLEST", 1)
    monkeypatch.setattr(gpu, "PIECE_BYTES", 1 << 16)
    if not torch.cuda.is_available():

        def stand_in(name: str) -> Gpu | None:
            return None if name == "cpu" else Gpu(torch.device("cpu"))

        monkeypatch.setattr(run, "open_gpu", stand_in)
        monkeypatch.setattr("gguf2st.conversion.open_gpu", stand_in)
    return "cuda"


def converted(directory: Path, model: str, to: str, chosen: dict[str, Any], **options: Any):
    file, mmproj = MODELS[model]
    report = gguf2st.convert(
        FIXTURES / file,
        directory,
        mmproj=mmproj and FIXTURES / mmproj,
        to=to,
        target=gguf2st.TargetOptions(**chosen),
        fit="rtn",
        **options,
    )
    return report, {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(("to", "chosen"), CHOICES, ids=str)
def test_the_same_files(model, to, chosen, device, tmp_path):
    if to == "lossless" and model != "qwen35moe":
        pytest.skip("the others hold types that lie on no grid")
    ours, found = converted(tmp_path / "device", model, to, chosen, device=device, threads=2)
    theirs, expected = converted(tmp_path / "cpu", model, to, chosen)
    assert found.keys() == expected.keys()
    for name, data in expected.items():
        assert found[name] == data, name
    for one, other in zip(ours.modules, theirs.modules, strict=True):
        assert one.name == other.name
        assert one.relative_rmse == pytest.approx(other.relative_rmse, rel=1e-4)


def test_values_that_are_not_finite_are_counted(device, tmp_path, monkeypatch):
    decode = gpu.decode_on_device

    def spoiled(*arguments: Any, **options: Any) -> torch.Tensor:
        values = decode(*arguments, **options)
        values.view(-1)[0] = np.inf
        return values

    # The device finds them and the CPU, whose values are sound, does the piece again.
    monkeypatch.setattr(gpu, "decode_on_device", spoiled)
    _, found = converted(tmp_path / "device", "llama", "bf16", {}, device=device)
    _, expected = converted(tmp_path / "cpu", "llama", "bf16", {})
    assert found == expected


def test_devices_that_are_not_there(monkeypatch):
    assert open_gpu("cpu") is None
    for name in ("gpu", "cuda:", "cuda:x", "CUDA", "cuda:1:2"):
        with pytest.raises(UsageError, match="isn't one of cpu, cuda or cuda:N"):
            open_gpu(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"PyTorch .* finds no CUDA device; install a build"):
        open_gpu("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"the last of the 2 CUDA device\(s\) is cuda:1"):
        open_gpu("cuda:2")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"needs PyTorch, .* pip install 'gguf2st\[cuda\]'"):
        open_gpu("cuda")


def test_a_full_device_is_told_in_one_sentence():
    with (
        pytest.raises(
            UsageError, match=r"memory of cpu isn't enough .* fewer of them with --threads"
        ),
        Gpu(torch.device("cpu")).worker(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
