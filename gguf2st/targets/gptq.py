"""GPTQ: symmetric integers of 4 or 8 bits, packed along inputs, without activation order.

Layout: GPTQModel's nn_modules/qlinear, `pack` ("gptq", that is v1: zero points are stored
less one); read by vLLM's quantization/auto_gptq.py and SGLang's quantization/gptq/gptq.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gguf2st.arrays import Array
from gguf2st.gguf.blocks import PackedRows
from gguf2st.quantize import pack_gptq, pack_gptq_zeros
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
from gguf2st.targets.names import check_undivided, cover, expressions
from gguf2st.targets.options import Choices, TargetOptions

NAME = "gptq"
# Asymmetric GPTQ and activation order have left vLLM.
CHOICES = Choices(
    bits=(4, 8),
    group_size=(128, 64, 32, 0),
    symmetric=(True,),
    dtype=("f16",),
)


class Gptq(QuantizedFormat):
    """Tensors of a module (out, in) with groups of g columns and p = 32 / bits codes in a word.

    | tensor | dtype | shape | content |
    |---|---|---|---|
    | qweight | I32 | (in / p, out) | codes, p inputs in a word, the first in the lowest bits |
    | qzeros | I32 | (in / g, out / p) | 2^(bits-1) - 1 everywhere |
    | scales | F16 | (in / g, out) | |
    | g_idx | I32 | (in,) | group of each input |

    All but the last run along outputs, so nothing can be written before the last row is in.
    """

    uniform = True

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """A row must consist of whole groups and words, and the rows of whole words."""
        (out, columns), pack = shape, 32 // scheme.bits
        return (
            ragged("columns", columns, scheme.group_size, "groups")
            or ragged("columns", columns, pack, "words")
            or ragged("rows", out, pack, "words")
        )

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """See the class."""
        (out, columns), name, pack = module.shape, module.name, 32 // module.scheme.bits
        groups = columns // _group_size(module)
        return [
            TensorSpec(f"{name}.qweight", "I32", (columns // pack, out)),
            TensorSpec(f"{name}.qzeros", "I32", (groups, out // pack)),
            TensorSpec(f"{name}.scales", "F16", (groups, out)),
            TensorSpec(f"{name}.g_idx", "I32", (columns,)),
        ]

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Holds the packed matrix until the end."""
        return _Encoder(module, context)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """`dynamic` says what isn't quantized.

        Its expressions are matched from the start of the names that engines use (vLLM's
        utils/gptq_utils.py and SGLang's quantization/utils.py, `get_dynamic_override`).
        """
        scheme, names = quantized[0].scheme, [module.name for module in quantized]
        check_undivided([names, unquantized])
        found = cover(unquantized, names)
        exact = [f"{re.escape(name)}$" for name in found.rest]
        return {
            "quant_method": "gptq",
            "bits": scheme.bits,
            "group_size": scheme.group_size or -1,
            "desc_act": False,
            "sym": True,
            "lm_head": any(name.endswith("lm_head") for name in names),
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "dynamic": {f"-:{e}": {} for e in [*expressions(found.candidates), *exact]},
        }


class _Encoder(IntegerEncoder):
    def encode(self, start: int, values: Array | PackedRows) -> Iterator[Piece]:
        rows = self._integers(values, "F16")
        (out, columns), bits, stop = self.module.shape, self.module.scheme.bits, start + len(values)
        qweight = self._held("qweight", (columns * bits // 32, out), "I32", values)
        scales = self._held("scales", (columns // _group_size(self.module), out), "F16", values)
        pack_gptq(rows.codes, bits, qweight[:, start:stop])
        scales[:, start:stop] = rows.scales.T
        return iter(())

    def finish(self) -> Iterator[Piece]:
        yield from super().finish()
        bits, (out, columns), group = (
            self.module.scheme.bits,
            self.module.shape,
            _group_size(self.module),
        )
        zeros = np.full((out, columns // group), 1 << (bits - 1), np.uint8)
        yield self._piece("qzeros", 0, pack_gptq_zeros(zeros, bits))
        yield self._piece("g_idx", 0, np.arange(columns, dtype="<i4") // group)


def _group_size(module: Quantized) -> int:
    return module.scheme.group_size or module.shape[1]


def _make(options: TargetOptions) -> Gptq:
    chosen = CHOICES.settle(NAME, options)
    sizes = CHOICES.group_sizes(options)
    schemes = [Scheme("int", chosen.bits, size) for size in sizes]
    return Gptq(NAME, chosen, schemes, int4_rungs(chosen))


register(NAME, _make)
