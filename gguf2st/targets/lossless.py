"""Lossless: of compressed-tensors' integer layouts the smallest that holds a GGUF type's values as they are.

Scales are float16, which holds the block scales of ggml; so is all that isn't quantized, within 2^-12 of
its values. Which types lie on which grid follows from their definitions (ggml-common.h) and is tested by
decoding both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from gguf2st.quantize import IntegerGrid, IntegerRows, exact_rows
from gguf2st.targets.base import (
    EncodeContext,
    ModuleEncoder,
    Quantized,
    Scheme,
    register,
)
from gguf2st.targets.compressed_tensors import CompressedTensors, CompressedTensorsEncoder
from gguf2st.targets.options import Choices, TargetOptions

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
}


class Lossless(CompressedTensors):
    """Tensors and configuration are those of compressed-tensors."""

    by_type = True

    def schemes_for(self, module: str, types: Collection[str] = ()) -> Sequence[Scheme]:
        """Layouts that hold all these types; none for types that lie on no grid."""
        if not types:
            return ()
        offered = [LAYOUTS.get(name, ()) for name in types]
        return [scheme for scheme in offered[0] if all(scheme in others for others in offered)]

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come."""
        return _Encoder(module, context, self.dtype)


class _Encoder(CompressedTensorsEncoder):
    def _integers(self, values: npt.NDArray[np.float32], scale_dtype: str) -> IntegerRows:
        scheme = self.module.scheme
        rows = exact_rows(values, IntegerGrid(scheme.bits, scheme.group_size, True, scale_dtype))
        if rows is None:
            # One value of Q3_K in many can be 128 units large, one more than there are.
            return super()._integers(values, scale_dtype)
        self.errors.add(rows.errors)
        return rows


def _make(options: TargetOptions) -> Lossless:
    return Lossless(CHOICES.settle(NAME, options), [*_NIBBLES, _BYTES], name=NAME)


register(NAME, _make)
