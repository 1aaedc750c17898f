"""compressed-tensors `pack-quantized`: integers of 4 or 8 bits with a scale for each group of a row.

Layout: compressed_tensors' compressors/pack_quantized/base.py (names) and helpers.py,
`pack_to_int32`; read by vLLM's and SGLang's schemes/compressed_tensors_wNa16.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gguf2st.arrays import Array, rounded_to
from gguf2st.gguf.blocks import PackedRows
from gguf2st.quantize import pack_rows, pack_zeros_down
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
from gguf2st.targets.compressed import PACKED, Arguments, arguments, configuration
from gguf2st.targets.options import Choices, Settled, TargetOptions, mixed_scheme

NAME = "compressed-tensors"
CHOICES = Choices(
    bits=(4, 8),
    group_size=(128, 64, 32, 0),
    symmetric=(True, False),
    dtype=("bf16", "f16"),
    mixed=True,
)


class CompressedTensors(QuantizedFormat):
    """Tensors of a module (out, in) with groups of g columns; per channel, in / g is 1.

    | tensor | dtype | shape | content |
    |---|---|---|---|
    | weight_packed | I32 | (out, ceil(in * bits / 32)) | codes + 2^(bits-1), the first in the lowest bits |
    | weight_scale | BF16 or F16 | (out, in / g) | |
    | weight_zero_point | I32 | (ceil(out * bits / 32), in / g) | asymmetric only; as codes, packed along rows |
    | weight_shape | I64 | (2,) | out, in |
    """

    def __init__(
        self,
        options: Settled,
        schemes: Sequence[Scheme],
        mixed: Sequence[tuple[re.Pattern[str], Sequence[Scheme]]] = (),
        *,
        name: str = NAME,
        rungs: Sequence[Sequence[Scheme]] = (),
    ) -> None:
        super().__init__(name, options, schemes, rungs)
        self._mixed = mixed

    def schemes(self) -> Sequence[Scheme]:
        """Those of all modules, and those of the user's own for some."""
        own = (scheme for _, schemes in self._mixed for scheme in schemes)
        return tuple(dict.fromkeys([*self._schemes, *own]))

    def schemes_for(self, module: str, types: Collection[str] = ()) -> Sequence[Scheme]:
        """The user's own for a module of that name, or those of all."""
        own = (schemes for pattern, schemes in self._mixed if pattern.search(module))
        return next(own, self._schemes)

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """A row must consist of whole groups."""
        return ragged("columns", shape[1], scheme.group_size, "groups")

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """See the class."""
        (out, columns), scheme, name = module.shape, module.scheme, module.name
        words, groups = -(-columns * scheme.bits // 32), _groups(module)
        specs = [
            TensorSpec(f"{name}.weight_packed", "I32", (out, words)),
            TensorSpec(f"{name}.weight_scale", self.dtype, (out, groups)),
            TensorSpec(f"{name}.weight_shape", "I64", (2,)),
        ]
        if not scheme.symmetric:
            zeros = (-(-out * scheme.bits // 32), groups)
            specs.append(TensorSpec(f"{name}.weight_zero_point", "I32", zeros))
        return specs

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come."""
        return CompressedTensorsEncoder(module, context, self.dtype)

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """One group of modules for each scheme."""
        return configuration(PACKED, quantized, unquantized, integer_weights)


class CompressedTensorsEncoder(IntegerEncoder):
    """Encodes rows as they come."""

    def __init__(self, module: Quantized, context: EncodeContext, dtype: str) -> None:
        super().__init__(module, context)
        self._dtype = dtype
        if not module.scheme.symmetric:
            # A word holds the zero points of this many rows.
            self.row_multiple = 32 // module.scheme.bits

    def encode(self, start: int, values: Array | PackedRows) -> Iterator[Piece]:
        """Yield codes and scales, and zero points where there are."""
        bits = self.module.scheme.bits
        rows = self._integers(values, self._dtype)
        yield self._piece("weight_packed", start, pack_rows(rows.codes, bits))
        yield self._piece("weight_scale", start, rounded_to(rows.scales, self._dtype))
        if not self.module.scheme.symmetric:
            yield self._piece(
                "weight_zero_point", start * bits // 32, pack_zeros_down(rows.zeros, bits)
            )

    def finish(self) -> Iterator[Piece]:
        """Yield the shape."""
        yield self._piece("weight_shape", 0, np.array(self.module.shape, "<i8"))


def _groups(module: Quantized) -> int:
    return module.shape[1] // module.scheme.group_size if module.scheme.group_size else 1


def integer_weights(scheme: Scheme) -> Arguments:
    """`QuantizationArgs` of integers with a scale for each group or row."""
    shared = {"symmetric": scheme.symmetric}
    if not scheme.group_size:
        return arguments("int", scheme.bits, "channel", **shared)
    return arguments("int", scheme.bits, "group", group_size=scheme.group_size, **shared)


def _make(options: TargetOptions) -> CompressedTensors:
    chosen = CHOICES.settle(NAME, options)

    # Left open, a module that 128 doesn't divide takes smaller groups, in a group of its own.
    def schemes(bits: int, group_size: int | None, symmetric: bool) -> list[Scheme]:
        sizes = CHOICES.group_sizes(replace(options, group_size=group_size))
        return [Scheme("int", bits, size, symmetric) for size in sizes]

    mixed = []
    for pattern, text in options.mixed:
        own = mixed_scheme(pattern, text)
        size = options.group_size if own.group_size is None else own.group_size
        symmetric = chosen.symmetric if own.symmetric is None else own.symmetric
        mixed.append((own.pattern, schemes(own.bits, size, symmetric)))
    # Engines' kernels take 8 bits without zero points alone.
    rungs = [*int4_rungs(chosen), [Scheme("int", 8, 32)]]
    return CompressedTensors(
        chosen, schemes(chosen.bits, options.group_size, chosen.symmetric), mixed, rungs=rungs
    )


register(NAME, _make, "ct")
