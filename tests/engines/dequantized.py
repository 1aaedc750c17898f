"""Dense checkpoints made from quantized ones, by decoders that aren't ours.

What an engine computes from a quantized checkpoint is compared with what transformers computes in
float32 from the weights that it stands for.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.targets import decoders

# The leaf that a quantized module has in each of the formats, and an unquantized one hasn't.
SCALES = re.compile(r"(.+)\.(?:scales|weight_scale|weight_scale_inv)")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
# transformers merges experts of a checkpoint itself, except for classes whose published
# checkpoints have them merged.
MERGED_EXPERTS = ("qwen3_5_moe",)


def dequantize(source: Path, target: Path) -> None:
    """Write the dense float32 checkpoint that stands for the quantized one at `source`."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text("utf-8"))
    quantization = config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    written = {}
    for path in source.glob("*.safetensors"):
        written |= load_file(path)
    dense = dequantized(written, quantization)
    if config["model_type"] in MERGED_EXPERTS:
        dense = with_merged_experts(dense)
    save_file(dense, target / "model.safetensors", {"format": "pt"})


def dequantized(written: dict[str, torch.Tensor], quantization: dict) -> dict[str, torch.Tensor]:
    """Replace all tensors of each quantized module by its weights."""
    dense = dict(written)
    for name in [match[1] for match in map(SCALES.fullmatch, written) if match]:
        for leaf in decoders.module_tensors(written, name):
            del dense[f"{name}.{leaf}"]
        with pytest.MonkeyPatch.context() as patch:
            weights = decoders.module(written, name, quantization, patch)
        dense[f"{name}.weight"] = torch.from_numpy(weights)
    return dense


def with_merged_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the experts of each layer, the rows of gate before those of up."""
    merged = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    layers: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for match in filter(None, map(EXPERT.fullmatch, tensors)):
        layers.setdefault(match[1], {})[int(match[2]), match[3]] = tensors[match[0]]
    for layer, parts in layers.items():
        numbers = sorted({number for number, _ in parts})
        merged[f"{layer}.gate_up_proj"] = torch.stack(
            [torch.cat((parts[number, "gate"], parts[number, "up"])) for number in numbers]
        )
        merged[f"{layer}.down_proj"] = torch.stack([parts[number, "down"] for number in numbers])
    return merged
