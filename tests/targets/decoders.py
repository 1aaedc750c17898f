"""Readers of the formats that aren't ours: compressed-tensors, vLLM, transformers.

Each takes leaf -> tensor of a module and gives its weights as float32 (out, in).
`module` finds the right one for a module of a checkpoint.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.engines import need

Tensors = dict[str, torch.Tensor]
LEAVES = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale"),
    *("weight_scale_inv", "weight"),
)


def module_tensors(written: Tensors, name: str) -> Tensors:
    """What a checkpoint's tensors have for a module, by leaf."""
    return {leaf: written[f"{name}.{leaf}"] for leaf in LEAVES if f"{name}.{leaf}" in written}


def module(
    written: Tensors, name: str, config: dict[str, Any], patch: pytest.MonkeyPatch
) -> np.ndarray:
    """A module's weights, read as `quantization_config` says."""
    parts = module_tensors(written, name)
    match config["quant_method"]:
        case "awq":
            return awq(parts, patch)
        case "gptq":
            return gptq(parts, config["bits"])
        case "fp8":
            return fp8_blocks(parts)
        case _:
            return compressed_tensors(parts, config, name)


def compressed_tensors(
    tensors: Tensors, config: dict[str, Any], name: str | None = None
) -> np.ndarray:
    """compressed-tensors' own decompressor, told by the configuration alone.

    `name` is needed where there is more than one group: it decides which is the module's.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    parsed = QuantizationConfig.model_validate(config)
    scheme = _group(parsed, name) if name else parsed.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    names = set(compressor.compression_param_names(scheme))
    if "mxfp4" in scheme.format:
        names.remove("weight_global_scale")  # inherited from NVFP4, which alone has one
    assert names == set(tensors)
    state = dict(tensors)
    if "fp4" not in scheme.format:
        # It computes in the scale's dtype; with float32 nothing is rounded.
        state["weight_scale"] = state["weight_scale"].float()
    return compressor.decompress(state, scheme)["weight"].float().numpy()


def _group(parsed: Any, name: str) -> Any:
    """The group of a module by compressed-tensors' own matching: names go before classes."""
    from compressed_tensors.utils.match import is_match

    linear = torch.nn.Linear(1, 1)
    groups = list(parsed.config_groups.values())
    named = [
        group
        for group in groups
        if is_match(name, linear, [t for t in group.targets if t != "Linear"], parsed.ignore)
    ]
    of_class = [g for g in groups if is_match(name, linear, g.targets, parsed.ignore)]
    return (named or of_class)[0]


def awq(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """vLLM's conversion of AWQ to its kernels' layout, and its unpacking of that."""
    need("vllm")
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.quantization.auto_awq import _convert_awq_to_standard_format
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        unpack_quantized_values_into_int32,
    )
    from vllm.scalar_type import scalar_types

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    layer = torch.nn.Module()
    for name in ("qweight", "qzeros"):
        layer.register_parameter(name, torch.nn.Parameter(tensors[name], requires_grad=False))
    _convert_awq_to_standard_format(layer, "qweight", "qzeros", 4)
    codes = unpack_quantized_values_into_int32(layer.qweight.data, scalar_types.uint4, 0)
    zeros = unpack_quantized_values_into_int32(layer.qzeros.data, scalar_types.uint4, 0).T
    return _grouped(codes, zeros, tensors["scales"].float())


def gptq(tensors: Tensors, bits: int) -> np.ndarray:
    """vLLM's unpacking; the zero point of version 1 is one less than it stands for."""
    need("vllm")
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        unpack_quantized_values_into_int32,
    )
    from vllm.scalar_type import scalar_types

    kind = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[bits]
    codes = unpack_quantized_values_into_int32(tensors["qweight"], kind, 0)
    zeros = unpack_quantized_values_into_int32(tensors["qzeros"], kind, 1) + 1
    # vLLM takes the zero point from the type and ignores what is stored.
    assert (zeros == kind.bias).all()
    group = tensors["g_idx"].long()
    scales = tensors["scales"].float()
    return ((codes - zeros[group]).float() * scales[group]).T.contiguous().numpy()


def fp8_blocks(tensors: Tensors) -> np.ndarray:
    """transformers' dequantization of fine-grained FP8."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    reader = Fp8Dequantize(None)
    weight = reader._dequantize_one(
        tensors["weight"], tensors["weight_scale_inv"], output_dtype=torch.float32
    )
    return weight.numpy()


def w4afp8_expert(tensors: Tensors) -> np.ndarray:
    """The packing of SGLang's test of its kernel: low nibble first, two's complement."""
    packed = tensors["weight"]
    low, high = (packed << 4) >> 4, packed >> 4
    codes = torch.stack((low, high), -1).flatten(-2)
    scales = tensors["weight_scale_inv"]
    # The kernel is given scales as bfloat16.
    assert torch.equal(scales, scales.bfloat16().float())
    assert tensors["input_scale"].tolist() == [1.0]
    return (codes.float() * scales.repeat_interleave(128, 1)).numpy()


def _grouped(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """(in, out) codes with (groups, out) zero points and scales -> (out, in)."""
    size = len(codes) // len(scales)
    zeros, scales = zeros.repeat_interleave(size, 0), scales.repeat_interleave(size, 0)
    return ((codes - zeros).float() * scales).T.contiguous().numpy()
