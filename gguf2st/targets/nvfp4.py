"""NVFP4: 4-bit floats (E2M1) with an FP8 scale for each 16 columns and one for the matrix.

compressed-tensors' `nvfp4-pack-quantized` (compressors/nvfp4/base.py and helpers.py),
weights only; read by vLLM's schemes/compressed_tensors_w4a4_nvfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array
from gguf2st.quantize import (
    nvfp4_block_errors,
    nvfp4_global_scale,
    nvfp4_global_scale_of,
    pack_nibbles,
    quantize_nvfp4,
)
from gguf2st.targets.base import (
    EncodeContext,
    ModuleEncoder,
    Piece,
    Quantized,
    Scheme,
    TensorSpec,
    register,
)
from gguf2st.targets.common import Encoder, QuantizedFormat, ragged
from gguf2st.targets.compressed import Arguments, arguments, configuration
from gguf2st.targets.options import Choices, TargetOptions

NAME = "nvfp4"
STORAGE = "nvfp4-pack-quantized"
GROUP = 16
SCHEME = Scheme("nvfp4", 4, GROUP)
CHOICES = Choices(bits=(4,), group_size=(GROUP,), symmetric=(True,), dtype=("bf16", "f16"))


class Nvfp4(QuantizedFormat):
    """Tensors of a module (out, in); a weight is code * weight_scale / weight_global_scale.

    | tensor | dtype | shape | content |
    |---|---|---|---|
    | weight_packed | U8 | (out, in / 2) | two codes in a byte, the even column in the low nibble |
    | weight_scale | F8_E4M3 | (out, in / 16) | |
    | weight_global_scale | F32 | (1,) | 448 * 6 / largest magnitude of all partners |

    Engines keep one global scale for the matrices that they join, so all have the same. Blocks
    of a GGUF that are NVFP4 keep their codes and scales; their factor (llama.cpp's tensor
    `*.scale`) becomes the reciprocal of the global scale.
    """

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """A row must consist of whole groups."""
        return ragged("columns", shape[1], GROUP, "groups")

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """See the class."""
        out, columns = module.shape
        return [
            TensorSpec(f"{module.name}.weight_packed", "U8", (out, columns // 2)),
            TensorSpec(f"{module.name}.weight_scale", "F8_E4M3", (out, columns // GROUP)),
            TensorSpec(f"{module.name}.weight_global_scale", "F32", (1,)),
        ]

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come; `context.group_maximum` or `block_factor` must be known."""
        return Nvfp4Encoder(module, context)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """Weights only."""
        return configuration(STORAGE, quantized, unquantized, weights)


def weights(_: Scheme) -> Arguments:
    """`QuantizationArgs` of NVFP4."""
    return arguments("float", 4, "tensor_group", group_size=GROUP)


class Nvfp4Encoder(Encoder):
    """Encodes rows as they come, or moves blocks of a GGUF."""

    def __init__(self, module: Quantized, context: EncodeContext) -> None:
        super().__init__(module, context)
        self._global_scale = (
            nvfp4_global_scale(context.group_maximum)
            if context.block_factor is None
            else nvfp4_global_scale_of(context.block_factor)
        )

    def encode(self, start: int, values: Array) -> Iterator[Piece]:
        """Yield codes and scales."""
        rows = quantize_nvfp4(values, self._global_scale, self.context.importance, self.context.fit)
        self.errors.add(rows.errors)
        yield self._piece("weight_packed", start, pack_nibbles(rows.codes))
        yield self._piece("weight_scale", start, rows.scales)

    def encode_blocks(self, start: int, blocks: npt.NDArray[np.uint8]) -> Iterator[Piece]:
        """Byte for byte: ggml's blocks are four scales, and 8 bytes of columns j and j + 8 for each."""
        fields = blocks.reshape(len(blocks), -1, 4 + 4 * GROUP // 2)
        scales = fields[..., :4].reshape(len(blocks), -1)
        if scales.max(initial=0) == 255:
            raise ValueError("a block has a scale of 480, more than E4M3 can hold")
        # ggml ignores the sign, and takes what isn't a number for 0.
        scales = np.where(scales == 127, np.uint8(0), scales & 127)
        pairs = fields[..., 4:].reshape(len(blocks), -1, GROUP // 2)
        codes = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(len(blocks), -1)
        assert self.context.block_factor is not None
        self.errors.add(
            nvfp4_block_errors(codes, scales, self.context.block_factor, self._global_scale)
        )
        yield self._piece("weight_packed", start, pack_nibbles(codes))
        yield self._piece("weight_scale", start, scales)

    def finish(self) -> Iterator[Piece]:
        """Yield the global scale."""
        yield self._piece("weight_global_scale", 0, np.array([self._global_scale], "<f4"))


def _make(options: TargetOptions) -> Nvfp4:
    return Nvfp4(NAME, CHOICES.settle(NAME, options), [SCHEME])


register(NAME, _make)
