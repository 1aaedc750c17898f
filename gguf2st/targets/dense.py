"""Unquantized output: bfloat16, float16 and float32."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.errors import UnsupportedError
from gguf2st.targets.base import (
    EncodeContext,
    ModuleEncoder,
    Quantized,
    Scheme,
    TensorSpec,
    register,
)
from gguf2st.targets.options import Choices, TargetOptions


class Dense:
    """Every tensor as it is, of one dtype but those that must stay float32."""

    uniform = False
    by_type = False

    def __init__(self, name: str, dtype: str, torch_dtype: str) -> None:
        self.name, self.dtype, self.torch_dtype = name, dtype, torch_dtype

    def schemes(self) -> Sequence[Scheme]:
        """None: nothing is quantized."""
        return ()

    def schemes_for(self, module: str, types: Collection[str] = ()) -> Sequence[Scheme]:
        """None: nothing is quantized."""
        return ()

    def rungs(self) -> Sequence[Sequence[Scheme]]:
        """None."""
        return ()

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """Always refuses."""
        return f"{self.name} quantizes nothing"

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """The weight alone."""
        return [TensorSpec(f"{module.name}.weight", self.dtype, module.shape)]

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """None: use `encode_dense`."""
        raise NotImplementedError(f"{self.name} quantizes nothing")

    def statically_scaled(self, modules: Sequence[Quantized]) -> Sequence[str]:
        """None."""
        return ()

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any] | None:
        """None: nothing is quantized."""
        return None


def encode_dense(spec: TensorSpec, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Values as the spec's dtype (BF16 as uint16), rounded once to nearest, ties to even.

    Raises `UnsupportedError` naming the tensor when a finite value is beyond float16.
    """
    if spec.dtype == "F32":
        return values.astype("<f4", copy=False)
    if spec.dtype == "F16":
        return _to_float16(spec.name, values)
    return to_bfloat16(values)


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
            "use --to bf16, or --to ct for integers with bfloat16 beside them."
        )
    return result


def _register(name: str, dtype: str, torch_dtype: str) -> None:
    def make(options: TargetOptions) -> Dense:
        Choices().settle(name, options)
        return Dense(name, dtype, torch_dtype)

    register(name, make)


_register("bf16", "BF16", "bfloat16")
_register("f16", "F16", "float16")
_register("f32", "F32", "float32")
