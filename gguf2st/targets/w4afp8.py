"""W4AFP8 for SGLang: experts of 4-bit integers, all other linear layers in FP8 blocks.

Layout: SGLang's layers/quantization/w4afp8.py, `W4AFp8MoEMethod.create_weights`, and
layers/moe/fused_moe_triton/layer.py, `_weight_loader_impl`; nibbles as in its test of
cutlass_w4a8_moe; the rest as in `fp8`'s blocks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from gguf2st.arrays import Array, rounded_to, signed
from gguf2st.errors import UnsupportedError
from gguf2st.gguf.blocks import PackedRows
from gguf2st.quantize import pack_nibbles
from gguf2st.targets.base import (
    EncodeContext,
    ModuleEncoder,
    Piece,
    Quantized,
    Scheme,
    TensorSpec,
    register,
)
from gguf2st.targets.common import IntegerEncoder, QuantizedFormat, ragged
from gguf2st.targets.fp8 import (
    BLOCK_SCHEME,
    BlockEncoder,
    block_refusal,
    block_tensors,
)
from gguf2st.targets.names import is_expert
from gguf2st.targets.options import Choices, TargetOptions

NAME = "w4afp8"
# The group size is fixed in SGLang's kernel, and the dtype by its get_supported_act_dtypes.
GROUP = 128
CHOICES = Choices(bits=(4,), group_size=(GROUP,), symmetric=(True,), dtype=("bf16",))
EXPERTS = Scheme("int", 4, GROUP, activation_bits=8)
# What SGLang builds without the checkpoint's quantization whatever it says: the head and
# embeddings, routers, the vision tower; MTP blocks load only for speculative decoding.
_NEVER_QUANTIZED = re.compile(
    r"(.*\.)?(lm_head|embed_tokens|gate|shared_expert_gate)$|(model\.)?(visual|mtp)\."
)


class W4AFp8(QuantizedFormat):
    """Tensors of an expert's matrix (out, in); other matrices are as in `fp8`'s blocks.

    | tensor | dtype | shape | content |
    |---|---|---|---|
    | weight | I8 | (out, in / 2) | two codes -8..7 in a byte, the even column in the low nibble |
    | weight_scale_inv | F32 | (out, in / 128) | what a code is multiplied with; SGLang rounds it to BF16 |
    | input_scale | F32 | (1,) | static scale of activations |
    """

    def schemes_for(self, module: str, types: Collection[str] = ()) -> Sequence[Scheme]:
        """Integers for experts, FP8 blocks for all others."""
        return (EXPERTS,) if is_expert(module) else (BLOCK_SCHEME,)

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """Whole groups, or whole blocks."""
        if scheme.kind == "fp8":
            return block_refusal(shape)
        return ragged("columns", shape[1], GROUP, "groups")

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """See the class."""
        if module.scheme.kind == "fp8":
            return block_tensors(module)
        (out, columns), name = module.shape, module.name
        return [
            TensorSpec(f"{name}.weight", "I8", (out, columns // 2)),
            TensorSpec(f"{name}.weight_scale_inv", "F32", (out, columns // GROUP)),
            TensorSpec(f"{name}.input_scale", "F32", (1,)),
        ]

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come."""
        return (BlockEncoder if module.scheme.kind == "fp8" else _Encoder)(module, context)

    def statically_scaled(self, modules: Sequence[Quantized]) -> Sequence[str]:
        """The experts'."""
        return [module.name for module in modules if module.scheme == EXPERTS]

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """The name of the method is all that SGLang's `W4AFp8Config.from_config` reads.

        So no module can be excepted: raises `UnsupportedError` for one that SGLang would
        take for FP8 blocks, and for a model without experts.
        """
        if not any(module.scheme.kind == "int" for module in quantized):
            raise UnsupportedError(
                "w4afp8 is a format for mixtures of experts, and no expert of this model is quantized; "
                "use --to fp8 --variant block."
            )
        for name in unquantized:
            if not _NEVER_QUANTIZED.match(name):
                raise UnsupportedError(
                    f"{name} stays unquantized, but SGLang takes every linear layer of a w4afp8 "
                    "checkpoint for FP8 blocks and can't be told of exceptions; use --to ct or --to fp8."
                )
        return {"quant_method": "w4afp8"}


class _Encoder(IntegerEncoder):
    def encode(self, start: int, values: Array | PackedRows) -> Iterator[Piece]:
        rows = self._integers(values, "BF16")
        # Codes are unsigned; flipping the top bit of a nibble subtracts 8.
        packed = pack_nibbles(rows.codes ^ 8)
        yield self._piece("weight", start, signed(packed))
        yield self._piece("weight_scale_inv", start, rounded_to(rows.scales, "F32"))

    def finish(self) -> Iterator[Piece]:
        yield self._piece("input_scale", 0, np.full(1, self.context.activation_scale, "<f4"))


def _make(options: TargetOptions) -> W4AFp8:
    return W4AFp8(NAME, CHOICES.settle(NAME, options), [EXPERTS, BLOCK_SCHEME])


register(NAME, _make)
