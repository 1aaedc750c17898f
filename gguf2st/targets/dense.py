"""Unquantized output: bfloat16, float16 and float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.errors import UnsupportedError
from gguf2st.mapping import Recipe
from gguf2st.targets.base import TensorSpec, register


class Dense:
    """One tensor for each recipe, all of one dtype but those that must stay float32."""

    def __init__(self, name: str, dtype: str, torch_dtype: str) -> None:
        self.name, self.dtype, self.torch_dtype = name, dtype, torch_dtype

    def tensors(self, recipe: Recipe) -> Sequence[TensorSpec]:
        """A single tensor of the recipe's name and shape."""
        dtype = "F32" if recipe.dtype == "f32" else self.dtype
        return [TensorSpec(recipe.name, dtype, recipe.shape)]

    def encode(self, spec: TensorSpec, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Round once to nearest, ties to even."""
        if spec.dtype == "F32":
            return values.astype("<f4", copy=False)
        if spec.dtype == "F16":
            return _to_float16(spec.name, values)
        return to_bfloat16(values)

    def quantization_config(self) -> dict[str, Any] | None:
        """None: nothing is quantized."""
        return None


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Upper halves of float32 values after rounding to nearest even, as uint16 of the same shape."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype("<u2")
    # Rounding could carry a NaN's low bits into infinity; keep it a quiet NaN of its sign.
    broken = np.isnan(values)
    if broken.any():
        result[broken] = (bits[broken] >> np.uint32(16)) | np.uint32(0x40)
    return result


def _to_float16(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        result = values.astype("<f2")
    if np.isinf(result).any() and (np.isinf(result) & np.isfinite(values)).any():
        raise UnsupportedError(
            f"tensor {name} has a value of {np.nanmax(np.abs(values)):.4g}, beyond float16's 65504; "
            "use --to bf16."
        )
    return result


register(Dense("bf16", "BF16", "bfloat16"))
register(Dense("f16", "F16", "float16"))
register(Dense("f32", "F32", "float32"))
