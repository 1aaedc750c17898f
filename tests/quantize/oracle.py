"""compressed-tensors' own arithmetic, called as llm-compressor calls it."""

from __future__ import annotations

import numpy as np
import torch
import torch._dynamo
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams

# Its FP4 cast is decorated with torch.compile, which needs a C++ compiler.
torch._dynamo.config.disable = True

TORCH = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def integer_args(bits: int, group: int, symmetric: bool, scale_dtype: str) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group or None,
        scale_dtype=TORCH[scale_dtype],
    )


def extremes(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = values.unflatten(-1, (-1, group or values.shape[-1]))
    return parts.amin(-1), parts.amax(-1)


def round_to_nearest(
    values: np.ndarray, bits: int, group: int, symmetric: bool, scale_dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned codes, scales, unsigned zero points and dequantized values."""
    x, args = torch.from_numpy(values), integer_args(bits, group, symmetric, scale_dtype)
    scales, zeros = calculate_qparams(*extremes(x, group), args)
    codes = quantize(x, scales, zeros, args, dtype=torch.int8)
    back = dequantize(codes, scales, zeros, args)
    half = 1 << (bits - 1)
    return (
        (codes.numpy().astype(np.int16) + half).astype(np.uint8),
        scales.numpy(),
        (zeros.numpy().astype(np.int16) + half).astype(np.uint8),
        back.numpy(),
    )


def compress(name: str, weights: QuantizationArgs, state: dict[str, torch.Tensor]):
    """What a compressor of compressed-tensors writes for a layer."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return BaseCompressor.get_value_from_registry(name).compress(state, scheme)


def decompress(name: str, weights: QuantizationArgs, state: dict[str, torch.Tensor]):
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return BaseCompressor.get_value_from_registry(name).decompress(state, scheme)
