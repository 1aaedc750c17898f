"""In each format, narrow matrices that SGLang has no kernel for become bfloat16 or float16."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf2st
from gguf2st.verification import Mend
from tests.conversions import FIXTURES, load
from tests.repairing.test_cases import check_equal, dequantized
from tests.verification.editing import base, opened

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("ct", {"group_size": 32}),
    "int4-asymmetric": ("ct", {"group_size": 32, "symmetric": False}),
    "int8": ("ct", {"bits": 8}),
    "awq": ("awq", {}),
    "gptq": ("gptq", {}),
    "gptq-int8": ("gptq", {"bits": 8}),
}
# SGLang's AWQ has kernels for narrow matrices, but a word of theirs belongs to one rank.
RANKS = {"awq": (2,)}
EXPRESSION = r"linear_attn\.in_proj_[ab]$"
NARROW = {f"model.layers.0.linear_attn.in_proj_{leaf}" for leaf in "ab"}


@pytest.mark.parametrize("name", FORMATS)
def test_narrow_matrices(name: str, tmp_path: Path) -> None:
    to, options = FORMATS[name]
    *_, model = sorted((FIXTURES / "qwen35").glob("qwen35-*.gguf"))
    source, output = tmp_path / "in", tmp_path / "out"
    gguf2st.convert(
        model,
        source,
        to=to,
        target=gguf2st.TargetOptions(**options),
        engines=("hf",),
        quantize=(EXPRESSION,),
        fit="rtn",
    )
    before = load(source)
    assert not any(f"{module}.weight" in before for module in NARROW)
    request: dict[str, Any] = {
        "tensor_parallel": RANKS.get(name, (1,)),
        "engines": ("vllm", "sglang"),
    }
    assert not gguf2st.verify(source, **request).right
    report = gguf2st.repair(source, output, **request)
    assert report.right and set(report.dequantized) >= NARROW, report.to_text()
    assert gguf2st.verify(output, **request).right
    config = json.loads((source / "config.json").read_text())
    assert "quantization_config" in config
    check_equal(load(output), dequantized(before, config, report.dequantized))


@pytest.mark.parametrize("name", FORMATS)
def test_a_lost_quantization_config(name: str, tmp_path: Path) -> None:
    """It is what it was, to the order of its entries."""
    to, options = FORMATS[name]
    source = base("llama", to, **options)
    edit = opened(source)
    lost = edit.config.pop("quantization_config")
    report = gguf2st.repair(edit.write(tmp_path / "in", source), tmp_path / "out")
    said = report.plan.documents.get("config.json", {}).get("quantization_config")
    if name == "gptq-int8":
        # Words of 8-bit codes look like those of 4-bit codes of twice as many columns.
        assert not report.right and "how many bits" in report.to_text()
        return
    assert report.right and report.plan.of(Mend.MATCH)
    assert {k: v for k, v in lost.items() if k != "pack_dtype"} == {
        key: said.get(key) for key in lost if key != "pack_dtype"
    }


def test_symmetric_awq_without_zero_points(tmp_path: Path) -> None:
    """They are 8 for all codes, and need only be written."""
    source = base("llama", "awq", symmetric=True)
    edit = opened(source)
    edit.quantization["zero_point"] = False
    edit.drop(".qzeros")
    report = gguf2st.repair(edit.write(tmp_path / "in", source), tmp_path / "out")
    assert report.right and not report.dequantized
    check_equal(load(tmp_path / "out"), load(source))


def test_lost_zero_points(tmp_path: Path) -> None:
    """Where codes aren't said to be symmetric, nothing stands for them."""
    source = base("llama", "awq")
    edit = opened(source)
    edit.drop("layers.0.mlp.down_proj.qzeros")
    report = gguf2st.repair(edit.write(tmp_path / "in", source), tmp_path / "out")
    assert not report.right and "its zero points (qzeros) aren't there" in report.to_text()


def test_shapes_that_transformers_needs(tmp_path: Path) -> None:
    source = base("llama", "ct", group_size=32)
    edit = opened(source)
    edit.drop("weight_shape")
    report = gguf2st.repair(edit.write(tmp_path / "in", source), tmp_path / "out")
    assert report.right and not report.dequantized
    check_equal(load(tmp_path / "out"), load(source))


def test_nothing_left_to_quantize(tmp_path: Path) -> None:
    """Where no matrix can stay quantized, the quantization_config goes."""
    source = base("llama", "ct", bits=8)
    report = gguf2st.repair(source, tmp_path / "out", engines=("vllm",), cpu=True)
    assert report.right and len(report.dequantized) == 14
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert {t.dtype for t in load(tmp_path / "out").values()} == {torch.bfloat16}
