"""Lossless: of compressed-tensors' layouts the smallest that holds a GGUF type's values as they are.

Scales are float16, which holds the block scales of ggml; so is all that isn't quantized, within 2^-11 of
its values (below 2^-14, within 2^-25). Which types lie on which grid follows from their definitions
(ggml-common.h) and is tested by decoding both sides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from gguf2st.arrays import Array, to_host
from gguf2st.gguf.blocks import PackedRows
from gguf2st.quantize import IntegerGrid, IntegerRows, exact_rows
from gguf2st.targets import nvfp4
from gguf2st.targets.base import (
    EncodeContext,
    ModuleEncoder,
    Quantized,
    Scheme,
    TensorSpec,
    register,
)
from gguf2st.targets.compressed import PACKED, Arguments, configuration
from gguf2st.targets.compressed_tensors import (
    CompressedTensors,
    CompressedTensorsEncoder,
    integer_weights,
)
from gguf2st.targets.options import Choices, Settled, TargetOptions

NAME = "lossless"
CHOICES = Choices(bits=(4, 8), symmetric=(True,), dtype=("f16",))
_NIBBLES = tuple(Scheme("int", 4, size) for size in (128, 64, 32))
_BYTES = Scheme("int", 8, 32)
_TERNARY = (*_NIBBLES, _BYTES)
# Layouts that hold each type, the smallest first: one scale for 32, 64 or 128 values at least, and
# integers of that size in units of it.
LAYOUTS: dict[str, tuple[Scheme, ...]] = {
    "Q4_0": (_NIBBLES[2], _BYTES),
    "TQ1_0": _TERNARY,
    "TQ2_0": _TERNARY,
    "Q1_0": _TERNARY,
    "Q2_0": (*_NIBBLES[1:], _BYTES),
    "Q5_0": (_BYTES,),
    "Q8_0": (_BYTES,),
    "Q3_K": (_BYTES,),
    "IQ4_NL": (_BYTES,),
    "IQ4_XS": (_BYTES,),
    "IQ3_S": (_BYTES,),
    "IQ3_XXS": (_BYTES,),
    "IQ2_XXS": (_BYTES,),
    "IQ1_S": (_BYTES,),
    "MXFP4": (_BYTES,),
    "NVFP4": (nvfp4.SCHEME,),
}


def on_grid(types: Collection[str], scheme: Scheme) -> bool:
    """Whether all values of blocks of these types are on the grids of a scheme, zero points or not."""
    plain = replace(scheme, symmetric=True)
    return bool(types) and all(plain in LAYOUTS.get(name, ()) for name in types)


class Lossless(CompressedTensors):
    """Tensors and configuration are those of compressed-tensors, and of NVFP4 for its blocks."""

    by_type = True

    def __init__(self, options: Settled) -> None:
        super().__init__(options, [*_NIBBLES, _BYTES, nvfp4.SCHEME], name=NAME)
        self._nvfp4 = nvfp4.Nvfp4(NAME, options, [nvfp4.SCHEME])

    def schemes_for(self, module: str, types: Collection[str] = ()) -> Sequence[Scheme]:
        """Layouts that hold all these types; none for types that lie on no grid."""
        if not types:
            return ()
        offered = [LAYOUTS.get(name, ()) for name in types]
        return [scheme for scheme in offered[0] if all(scheme in others for others in offered)]

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """Those of the layout."""
        if module.scheme == nvfp4.SCHEME:
            return self._nvfp4.tensors(module)
        return super().tensors(module)

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come."""
        if module.scheme == nvfp4.SCHEME:
            return self._nvfp4.encoder(module, context)
        return _Encoder(module, context, self.dtype)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """One group of modules for each layout."""

        def storage(scheme: Scheme) -> str:
            return nvfp4.STORAGE if scheme == nvfp4.SCHEME else PACKED

        def weights(scheme: Scheme) -> Arguments:
            return nvfp4.weights(scheme) if scheme == nvfp4.SCHEME else integer_weights(scheme)

        return configuration(storage, quantized, unquantized, weights)


class _Encoder(CompressedTensorsEncoder):
    def __init__(self, module: Quantized, context: EncodeContext, dtype: str) -> None:
        super().__init__(module, context, dtype)
        self.takes_packed = False

    def _integers(self, values: Array | PackedRows, scale_dtype: str) -> IntegerRows:
        # Whether values lie on a grid is found value by value, which suits no other device.
        values = to_host(values)
        scheme = self.module.scheme
        rows = exact_rows(values, IntegerGrid(scheme.bits, scheme.group_size, True, scale_dtype))
        if rows is None:
            # A scale of MXFP4 can lie beyond float16.
            self.errors.largest = math.inf
            return super()._integers(values, scale_dtype)
        self.errors.add(rows.errors)
        return rows


def _make(options: TargetOptions) -> Lossless:
    return Lossless(CHOICES.settle(NAME, options))


register(NAME, _make)
