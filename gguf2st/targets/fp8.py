"""FP8 (E4M3) weights: a scale for each row, or for each block of 128x128.

"channel" is compressed-tensors' `float-quantized` (compressors/naive_quantized/base.py;
read by vLLM's and SGLang's schemes/compressed_tensors_w8a8_fp8.py). "block" is
transformers' native `fp8` (integrations/finegrained_fp8.py, `Fp8Dequantize`; read by
vLLM's and SGLang's quantization/fp8.py). Engines quantize activations while serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gguf2st.arrays import Array, rounded_to
from gguf2st.quantize import quantize_fp8_blocks, quantize_fp8_rows
from gguf2st.targets.base import (
    EncodeContext,
    ModuleEncoder,
    Piece,
    Quantized,
    Scheme,
    TensorSpec,
    register,
)
from gguf2st.targets.common import Encoder, QuantizedFormat, RowScaledFormat, ragged
from gguf2st.targets.compressed import arguments, configuration, token_activations
from gguf2st.targets.names import check_undivided
from gguf2st.targets.options import Choices, TargetOptions
from gguf2st.targets.skipped import names

NAME = "fp8"
BLOCK = 128
CHOICES = {
    "channel": Choices(
        bits=(8,),
        group_size=(0,),
        symmetric=(True,),
        variant=("channel", "block"),
        dtype=("bf16", "f16"),
    ),
    "block": Choices(
        bits=(8,),
        group_size=(BLOCK,),
        symmetric=(True,),
        variant=("channel", "block"),
        dtype=("bf16", "f16"),
    ),
}
BLOCK_SCHEME = Scheme("fp8", 8, BLOCK, block_rows=BLOCK, activation_bits=8)


class ChannelFp8(RowScaledFormat):
    """A module (out, in): `weight` F8_E4M3 (out, in), `weight_scale` BF16 or F16 (out, 1).

    Scales are of the model's dtype although engines compute with float32: transformers
    loads them into a parameter of that dtype and would round others.
    """

    code_dtype = "F8_E4M3"

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come."""
        return _ChannelEncoder(module, context, self.dtype)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """Activations get one scale for each token while serving."""
        return configuration(
            "float-quantized",
            quantized,
            unquantized,
            lambda scheme: arguments("float", 8, "channel"),
            token_activations("float"),
        )


class BlockFp8(QuantizedFormat):
    """A module (out, in): `weight` F8_E4M3 (out, in), `weight_scale_inv` F32 (out / 128, in / 128).

    Despite its name, `weight_scale_inv` is what a weight is multiplied with.
    """

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """Whole blocks only."""
        return block_refusal(shape)

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """See the class."""
        return block_tensors(module)

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come, 128 or a multiple of them."""
        return BlockEncoder(module, context)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """Activations get one scale for each 128 columns of a token while serving."""
        written = [module.name for module in quantized]
        check_undivided([written, unquantized])
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": names(unquantized, written),
        }


def block_refusal(shape: tuple[int, int]) -> str | None:
    """Why a matrix (out, in) can't be stored in blocks, or None.

    Engines would take an incomplete block at the end of a matrix that isn't joined to
    another. transformers, when it dequantizes, divides rows by the number of scales and
    so silently assumes smaller blocks.
    """
    return ragged("rows", shape[0], BLOCK, "blocks") or ragged("columns", shape[1], BLOCK, "blocks")


def block_tensors(module: Quantized) -> list[TensorSpec]:
    """Weight and scales of a matrix in blocks."""
    out, columns = module.shape
    return [
        TensorSpec(f"{module.name}.weight", "F8_E4M3", module.shape),
        TensorSpec(f"{module.name}.weight_scale_inv", "F32", (out // BLOCK, columns // BLOCK)),
    ]


class BlockEncoder(Encoder):
    """Encodes rows in blocks of 128x128."""

    row_multiple = BLOCK

    def encode(self, start: int, values: Array) -> Iterator[Piece]:
        """See `ModuleEncoder`."""
        rows = quantize_fp8_blocks(values, self.context.importance, self.context.fit)
        self.errors.add(rows.errors)
        yield self._piece("weight", start, rows.codes)
        yield self._piece("weight_scale_inv", start // BLOCK, rounded_to(rows.scales, "F32"))


class _ChannelEncoder(Encoder):
    def __init__(self, module: Quantized, context: EncodeContext, dtype: str) -> None:
        super().__init__(module, context)
        self._dtype = dtype

    def encode(self, start: int, values: Array) -> Iterator[Piece]:
        rows = quantize_fp8_rows(values, self._dtype, self.context.importance, self.context.fit)
        self.errors.add(rows.errors)
        yield self._piece("weight", start, rows.codes)
        yield self._piece("weight_scale", start, rounded_to(rows.scales, self._dtype))


def _make(options: TargetOptions) -> ChannelFp8 | BlockFp8:
    chosen = CHOICES.get(options.variant or "", CHOICES["channel"]).settle(NAME, options)
    if chosen.variant == "block":
        return BlockFp8(NAME, chosen, [BLOCK_SCHEME])
    return ChannelFp8(NAME, chosen, [Scheme("fp8", 8, 0, activation_bits=8)])


register(NAME, _make)
