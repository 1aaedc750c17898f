"""NVFP4: 4-bit floats (E2M1) with an FP8 scale for each 16 columns and one for the matrix.

compressed-tensors' `nvfp4-pack-quantized` (compressors/nvfp4/base.py and helpers.py),
weights only; read by vLLM's schemes/compressed_tensors_w4a4_nvfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.quantize import nvfp4_global_scale, pack_nibbles, quantize_nvfp4
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
from gguf2st.targets.compressed import arguments, configuration
from gguf2st.targets.options import Choices, TargetOptions

NAME = "nvfp4"
GROUP = 16
CHOICES = Choices(bits=(4,), group_size=(GROUP,), symmetric=(True,), dtype=("bf16", "f16"))


class Nvfp4(QuantizedFormat):
    """Tensors of a module (out, in); a weight is code * weight_scale / weight_global_scale.

    | tensor | dtype | shape | content |
    |---|---|---|---|
    | weight_packed | U8 | (out, in / 2) | two codes in a byte, the even column in the low nibble |
    | weight_scale | F8_E4M3 | (out, in / 16) | |
    | weight_global_scale | F32 | (1,) | 448 * 6 / largest magnitude of all partners |

    Engines keep one global scale for the matrices that they join, so all have the same.
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
        """Writes rows as they come; `context.group_maximum` must be known."""
        return _Encoder(module, context)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """Weights only."""
        weights = arguments("float", 4, "tensor_group", group_size=GROUP)
        return configuration("nvfp4-pack-quantized", quantized, unquantized, lambda _: weights)


class _Encoder(Encoder):
    def __init__(self, module: Quantized, context: EncodeContext) -> None:
        super().__init__(module, context)
        self._global_scale = nvfp4_global_scale(context.group_maximum)

    def encode(self, start: int, values: npt.NDArray[np.float32]) -> Iterator[Piece]:
        rows = quantize_nvfp4(values, self._global_scale, self.context.importance, self.context.fit)
        self.errors.add(rows.errors)
        yield self._piece("weight_packed", start, pack_nibbles(rows.codes))
        yield self._piece("weight_scale", start, rows.scales)

    def finish(self) -> Iterator[Piece]:
        yield self._piece("weight_global_scale", 0, np.array([self._global_scale], "<f4"))


def _make(options: TargetOptions) -> Nvfp4:
    return Nvfp4(NAME, CHOICES.settle(NAME, options), [Scheme("nvfp4", 4, GROUP)])


register(NAME, _make)
