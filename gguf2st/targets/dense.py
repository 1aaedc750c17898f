"""Unquantized output: bfloat16, float16 and float32."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array, is_tensor, rounded_to, to_host
from gguf2st.errors import UnsupportedError
from gguf2st.rounding import DTYPES, round_values
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


def encode_dense(spec: TensorSpec, values: Array) -> Array:
    """Float32 values as the spec's dtype (BF16 as uint16), rounded once to nearest, ties to even.

    Raises `UnsupportedError` naming the tensor when a finite value is beyond float16.
    """
    if spec.dtype == "F32" or is_tensor(values):
        found = rounded_to(values, spec.dtype)
        if spec.dtype == "F16" and not found.isfinite().all():
            check_range(spec, to_host(values))
        return found
    result = np.empty(values.shape, DTYPES[spec.dtype])
    if round_values(np.ascontiguousarray(values), spec.dtype, result):
        check_range(spec, values)
    return result


def check_range(spec: TensorSpec, values: npt.NDArray[np.float32]) -> None:
    """Raise `UnsupportedError` naming the tensor when a finite value is beyond float16."""
    if spec.dtype != "F16":
        return
    largest = np.abs(values[np.isfinite(values)]).max(initial=0)
    # From here on, rounding to nearest leads to infinity.
    if largest >= 65520:
        raise UnsupportedError(
            f"tensor {spec.name} has a value of {largest:.4g}, beyond float16's 65504; "
            "use --to bf16, or --to ct for integers with bfloat16 beside them."
        )


def _register(name: str, dtype: str, torch_dtype: str) -> None:
    def make(options: TargetOptions) -> Dense:
        Choices().settle(name, options)
        return Dense(name, dtype, torch_dtype)

    register(name, make)


_register("bf16", "BF16", "bfloat16")
_register("f16", "F16", "float16")
_register("f32", "F32", "float32")
