"""MXFP4: 4-bit floats (E2M1) with a power of two for each 32 columns, activations as they are.

Variant "compressed" is compressed-tensors' `mxfp4-pack-quantized` (compressors/mxfp4/base.py,
nvfp4/helpers.py, mx_utils.py); read by vLLM's schemes/compressed_tensors_w4a4_mxfp4.py.
Variant "native" is how OpenAI published gpt-oss: experts alone, stacked; read by transformers'
integrations/mxfp4.py and the gpt_oss models of vLLM and SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array
from gguf2st.errors import UnsupportedError
from gguf2st.quantize import pack_nibbles, quantize_mxfp4
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

NAME = "mxfp4"
GROUP = 32
CHOICES = Choices(
    bits=(4,),
    group_size=(GROUP,),
    symmetric=(True,),
    variant=("compressed", "native"),
    dtype=("bf16", "f16"),
)
# Beside native experts engines compute in bfloat16 alone.
NATIVE_CHOICES = replace(CHOICES, dtype=("bf16",))
# A scale from here on lets the largest codes be more than float32 holds; 255 means NaN.
_LARGEST_SCALE = 252


class Mxfp4(QuantizedFormat):
    """Tensors of a module (out, in).

    | tensor | dtype | shape | content |
    |---|---|---|---|
    | weight_packed | U8 | (out, in / 2) | two codes in a byte, the even column in the low nibble |
    | weight_scale | U8 | (out, in / 32) | E8M0: byte b is 2^(b - 127) |
    """

    def refusal(self, shape: tuple[int, int], scheme: Scheme) -> str | None:
        """A row must consist of whole groups."""
        return ragged("columns", shape[1], GROUP, "groups")

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """See the class."""
        out, columns = module.shape
        return [
            TensorSpec(f"{module.name}.weight_packed", "U8", (out, columns // 2)),
            TensorSpec(f"{module.name}.weight_scale", "U8", (out, columns // GROUP)),
        ]

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come."""
        return _Encoder(module, context, ".weight_packed", ".weight_scale")

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """Weights only."""
        weights = arguments("float", 4, "group", group_size=GROUP, scale_dtype="torch.uint8")
        return configuration("mxfp4-pack-quantized", quantized, unquantized, lambda _: weights)


class NativeMxfp4(Mxfp4):
    """Tensors of stacked experts, each (out, in).

    | tensor | dtype | shape | content |
    |---|---|---|---|
    | _blocks | U8 | (experts, out, in / 32, 16) | two codes in a byte, the even column in the low nibble |
    | _scales | U8 | (experts, out, in / 32) | E8M0: byte b is 2^(b - 127) |
    """

    def tensors(self, module: Quantized) -> Sequence[TensorSpec]:
        """See the class."""
        out, columns = module.shape
        groups = (max(1, module.experts), out, columns // GROUP)
        return [
            TensorSpec(f"{module.name}_blocks", "U8", (*groups, GROUP // 2)),
            TensorSpec(f"{module.name}_scales", "U8", groups),
        ]

    def encoder(self, module: Quantized, context: EncodeContext) -> ModuleEncoder:
        """Writes rows as they come."""
        return _Encoder(module, context, "_blocks", "_scales")

    def quantization_config(
        self, quantized: Sequence[Quantized], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """All experts, and a list of everything else.

        Raises `UnsupportedError` where experts of some blocks are left out: engines would
        look for codes in all of them.
        """
        return {"quant_method": NAME, "modules_to_not_convert": _exceptions(quantized, unquantized)}


def _exceptions(quantized: Sequence[Quantized], unquantized: Sequence[str]) -> list[str]:
    """The least that tells unquantized modules from quantized ones, with "*" for the block."""
    inside = {prefix for module in quantized for prefix in _prefixes(_of_any_block(module.name))}
    entries: dict[str, None] = {}
    for name in unquantized:
        entry = next((p for p in _prefixes(_of_any_block(name)) if p not in inside), None)
        if entry is None:
            raise UnsupportedError(
                f"{name} can't stay unquantized in this format, which has the same modules of all "
                "blocks quantized; quantize all or choose another format."
            )
        entries[entry] = None
    return list(entries)


def _of_any_block(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _prefixes(name: str) -> Iterator[str]:
    """ "a", "a.b" and "a.b.c" of "a.b.c"."""
    parts = name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


class _Encoder(Encoder):
    def __init__(self, module: Quantized, context: EncodeContext, codes: str, scales: str) -> None:
        super().__init__(module, context)
        self._codes, self._scales = module.name + codes, module.name + scales

    def encode(self, start: int, values: Array) -> Iterator[Piece]:
        rows = quantize_mxfp4(values, self.context.importance, self.context.fit)
        self.errors.add(rows.errors)
        yield from self._pieces(start, rows.codes, rows.scales)

    def encode_blocks(self, start: int, blocks: npt.NDArray[np.uint8]) -> Iterator[Piece]:
        """Byte for byte: ggml's blocks are a scale and 16 bytes of columns j and j + 16."""
        groups = blocks.reshape(len(blocks), -1, 1 + GROUP // 2)
        scales, pairs = groups[..., 0], groups[..., 1:]
        if scales.max(initial=0) > _LARGEST_SCALE:
            raise ValueError(f"a block has the scale 2^{int(scales.max()) - 127}, beyond float32")
        codes = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(len(blocks), -1)
        yield from self._pieces(start, codes, np.ascontiguousarray(scales))

    def _pieces(
        self, start: int, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]
    ) -> Iterator[Piece]:
        yield Piece(self._codes, start, pack_nibbles(codes))
        yield Piece(self._scales, start, scales)


def _make(options: TargetOptions) -> Mxfp4:
    if options.variant == "native":
        scheme = Scheme("mxfp4", 4, GROUP, stacked=True)
        return NativeMxfp4(NAME, NATIVE_CHOICES.settle(NAME, options), [scheme])
    return Mxfp4(NAME, CHOICES.settle(NAME, options), [Scheme("mxfp4", 4, GROUP)])


register(NAME, _make)
