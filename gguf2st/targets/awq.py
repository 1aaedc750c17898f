"""AWQ, its "gemm" order: 4-bit integers with zero points, packed across outputs.

Layout: AutoAWQ's awq/modules/linear/gemm.py, `WQLinear_GEMM.from_linear`; read by
vLLM's quantization/auto_awq.py and SGLang's quantization/awq/awq.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gguf2st.arrays import Array
from gguf2st.gguf.blocks import PackedRows
from gguf2st.quantize import pack_awq
from gguf2st.targets.base import (
    EncodeContext,
    ModuleEncoder,
    Piece,
    Quantized,
    Scheme,
    TensorSpec,
    register,
)
from gguf2st.targets.common import IntegerEncoder, QuantizedFormat, int4_rungs, ragged
from gguf2st.targets.names import check_undivided
from gguf2st.targets.options import Choices, TargetOptions
from gguf2st.targets.skipped import substrings

NAME = "awq"
# Nibbles of a 32-bit word
PACK = 8
# float16 alone: SGLang's kernels for it and transformers take nothing else.
CHOICES = Choices(
    bits=(4,),
    group_size=(128, 64, 32),
    symmetric=(False, True),
    variant=("gemm",),
    dtype=("f16",),
)


class Awq(QuantizedFormat):
    """Tensors of a module (out, in) with groups of g columns.

    | tensor | dtype | shape | content |
    |---|---|---|---|
    | qweight | I32 | (in, out / 8) | codes 0..15, eight outputs in a word in the order 0 2 4 6 1 3 5 7 |
    | qzeros | I32 | (in / g, out / 8) | zero points, packed alike; all 8 when symmetric |
    | scales | F16 | (in / g, out) | |

    All of them run along outputs, so nothing can be written before the last row is in.
    """

    uniform = True

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """A row must consist of whole groups, and the rows of whole words."""
        out, columns = shape
        return ragged("columns", columns, scheme.group_size, "groups") or ragged(
            "rows", out, PACK, "words"
        )

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """See the class."""
        (out, columns), name = module.shape, module.name
        groups = columns // module.scheme.group_size
        return [
            TensorSpec(f"{name}.qweight", "I32", (columns, out // PACK)),
            TensorSpec(f"{name}.qzeros", "I32", (groups, out // PACK)),
            TensorSpec(f"{name}.scales", "F16", (groups, out)),
        ]

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Holds the packed matrix until the end."""
        return _Encoder(module, context)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """`zero_point` is always true: vLLM has no kernel for AWQ without, yet loads qzeros."""
        names = [module.name for module in quantized]
        check_undivided([names, unquantized])
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": quantized[0].scheme.group_size,
            "zero_point": True,
            "version": "gemm",
            "lm_head": any(name.endswith("lm_head") for name in names),
            "modules_to_not_convert": substrings(unquantized, names),
        }


class _Encoder(IntegerEncoder):
    row_multiple = 8 * PACK  # as many as are packed at once

    def encode(self, start: int, values: Array | PackedRows) -> Iterator[Piece]:
        rows = self._integers(values, "F16")
        (out, columns), stop = self.module.shape, start + len(values)
        groups = columns // self.module.scheme.group_size
        words = slice(start // PACK, stop // PACK)
        qweight = self._held("qweight", (columns, out // PACK), "I32", values)
        qzeros = self._held("qzeros", (groups, out // PACK), "I32", values)
        scales = self._held("scales", (groups, out), "F16", values)
        pack_awq(rows.codes, qweight[:, words])
        pack_awq(rows.zeros, qzeros[:, words])
        scales[:, start:stop] = rows.scales.T
        return iter(())


def _make(options: TargetOptions) -> Awq:
    chosen = CHOICES.settle(NAME, options)
    sizes = CHOICES.group_sizes(options)
    schemes = [Scheme("int", 4, size, chosen.symmetric) for size in sizes]
    return Awq(NAME, chosen, schemes, int4_rungs(chosen))


register(NAME, _make)
