"""No rule finds anything in checkpoints that are right: our own, in every format, and others'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import gguf2st
from gguf2st.targets import target_named, target_names
from tests.conversions import FIXTURES, Case, cases, converted, load, one_per_folder
from tests.oracles.originals import write_checkpoint
from tests.verification.editing import base, opened

FORMATS = [name for name in target_names() if target_named(name).schemes()]
QUIET = ("note", "slower")


def loud(report: gguf2st.VerifyReport) -> list[str]:
    return [
        f"{f.rule} {f.engine} {f.effect}: {f.subjects[:3]} {f.reason}"
        for f in report.findings
        if f.effect not in QUIET
    ]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_unquantized_conversion(case: Case) -> None:
    report = gguf2st.verify(converted(case), deep=True)
    assert not loud(report)
    assert not report.unchecked


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("case", one_per_folder(cases()), ids=str)
def test_every_format(case: Case, to: str, tmp_path: Path) -> None:
    """For the engines that the format was made for."""
    try:
        made = gguf2st.convert(case.model, tmp_path / "out", to=to, fit="rtn", threads=2)
    except gguf2st.UnsupportedError:
        pytest.skip("the format doesn't take the model")
    report = gguf2st.verify(made.output, made.engines, deep=True)
    found = loud(report)
    if any("drafter" in warning for warning in made.warnings):
        # What the plan has warned of: an engine reads a drafter in another way.
        found = [text for text in found if "speculative decoding" not in text]
    assert not found
    assert report.right
    assert not [text for text in report.unchecked if "matches a gptq config" not in text]


# Those of NVFP4 were saved for llama.cpp's converter alone, and one of blocks is no model.
FOLDERS = [
    folder
    for folder in sorted(path.parent for path in FIXTURES.glob("*/original.json"))
    if folder.name != "blocks" and "nvfp4" not in folder.name
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_original(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(folder, tmp_path / "original")
    report = gguf2st.verify(tmp_path / "original", deep=True)
    known = {"D-38"}  # some fixtures' originals have no tokenizer beside them
    assert not [f for f in report.findings if f.effect not in QUIET and f.rule not in known]


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3-small", "mixtral"]
)
def test_saved_by_transformers(name: str, tmp_path: Path) -> None:
    case = next(c for c in one_per_folder(cases()) if c.folder.name == name)
    model = transformers.AutoModelForCausalLM.from_pretrained(converted(case))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    transformers.AutoTokenizer.from_pretrained(converted(case)).save_pretrained(tmp_path)
    report = gguf2st.verify(tmp_path, deep=True)
    assert report.files > 1
    assert not loud(report)


def test_what_transformers_drops_from_qwen35(tmp_path: Path) -> None:
    """It saves neither MTP blocks nor the interval that SGLang reads: both are found."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base("qwen35"))
    fields = model.config.to_dict()
    del fields["full_attention_interval"]  # which a model that was never loaded doesn't have
    model.config = type(model.config).from_dict(fields)
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(base("qwen35")).save_pretrained(tmp_path)
    report = gguf2st.verify(tmp_path)
    assert {f.rule for f in report.findings if f.effect not in QUIET} == {"D-20", "D-40"}
    assert [v.right for v in report.verdicts] == [True, False, True]


SCHEMES: dict[str, dict[str, Any]] = {
    "W4A16": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "W4A16-asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "W8A16": {"num_bits": 8, "strategy": "channel"},
    "FP8": {"num_bits": 8, "strategy": "channel", "type": "float"},
    "INT8": {"num_bits": 8, "strategy": "channel"},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_written_by_compressed_tensors(name: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    source = converted(next(c for c in one_per_folder(cases()) if c.folder.name == "llama"))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    activations = None
    if name in ("FP8", "INT8"):
        kind = SCHEMES[name].get("type", "int")
        activations = QuantizationArgs(num_bits=8, type=kind, strategy="token", dynamic=True)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**SCHEMES[name]),
        input_activations=activations,
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            largest = (127 if name == "INT8" else 2 ** (SCHEMES[name]["num_bits"] - 1) - 1) or 1
            shape = module.weight_scale.shape
            weight = module.weight.data.float().reshape(shape[0], shape[1], -1)
            peak = 448 if name == "FP8" else largest
            module.weight_scale.data = (weight.abs().amax(-1) / peak).to(torch.bfloat16)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
    report = gguf2st.verify(tmp_path)
    assert report.quantization.startswith("compressed-tensors")
    assert not loud(report)


AUTO_AWQ = {
    "quant_method": "awq",
    "zero_point": True,
    "group_size": 128,
    "bits": 4,
    "version": "gemm",
    "modules_to_not_convert": None,
}
GPTQ_MODEL = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05, "true_sequential": True},
}


@pytest.mark.parametrize("config", [AUTO_AWQ, GPTQ_MODEL], ids=["AutoAWQ", "GPTQModel"])
def test_laid_out_as_others_do(config: dict[str, Any], tmp_path: Path) -> None:
    """Shapes as AutoAWQ's WQLinear_GEMM and GPTQModel's TorchQuantLinear register them."""
    source = converted(next(c for c in one_per_folder(cases()) if c.folder.name == "llama"))
    tensors = {}
    for name, weight in load(source).items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.to(torch.float16)
            continue
        out, columns = weight.shape
        groups = columns // 128
        if config is AUTO_AWQ:
            tensors[f"{module}.qweight"] = torch.full(
                (columns, out // 8), 0x12345678, dtype=torch.int32
            )
        else:
            tensors[f"{module}.qweight"] = torch.full(
                (columns // 8, out), 0x12345678, dtype=torch.int32
            )
            tensors[f"{module}.g_idx"] = torch.arange(columns, dtype=torch.int32) // 128
        tensors[f"{module}.qzeros"] = torch.full((groups, out // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{module}.scales"] = torch.full((groups, out), 0.01, dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    whole = opened(source).config | {"quantization_config": config, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    if config is GPTQ_MODEL:
        (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
    assert not loud(gguf2st.verify(tmp_path, deep=True))
