"""W8A8: 8-bit integer weights with a scale for each row, activations quantized while serving.

compressed-tensors' `int-quantized` (compressors/naive_quantized/base.py); read by vLLM's
and SGLang's schemes/compressed_tensors_w8a8_int8.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gguf2st.arrays import Array, rounded_to, signed
from gguf2st.gguf.blocks import PackedRows
from gguf2st.targets.base import (
    EncodeContext,
    ModuleEncoder,
    Piece,
    Quantized,
    Scheme,
    register,
)
from gguf2st.targets.common import IntegerEncoder, RowScaledFormat
from gguf2st.targets.compressed import arguments, configuration, token_activations
from gguf2st.targets.options import Choices, TargetOptions

NAME = "w8a8"
CHOICES = Choices(bits=(8,), group_size=(0,), symmetric=(True,), dtype=("bf16", "f16"))


class W8A8(RowScaledFormat):
    """A module (out, in): `weight` I8 (out, in), `weight_scale` BF16 or F16 (out, 1)."""

    code_dtype = "I8"

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come."""
        return _Encoder(module, context, self.dtype)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """Activations get one scale for each token while serving."""
        return configuration(
            "int-quantized",
            quantized,
            unquantized,
            lambda scheme: arguments("int", 8, "channel"),
            token_activations("int"),
        )


class _Encoder(IntegerEncoder):
    def __init__(self, module: Quantized, context: EncodeContext, dtype: str) -> None:
        super().__init__(module, context)
        self._dtype = dtype

    def encode(self, start: int, values: Array | PackedRows) -> Iterator[Piece]:
        rows = self._integers(values, self._dtype)
        # Codes are unsigned; flipping the top bit subtracts 128.
        yield self._piece("weight", start, signed(rows.codes ^ 0x80))
        yield self._piece("weight_scale", start, rounded_to(rows.scales, self._dtype))


def _make(options: TargetOptions) -> W8A8:
    return W8A8(NAME, CHOICES.settle(NAME, options), [Scheme("int", 8, 0, activation_bits=8)])


register(NAME, _make)
