"""Decoding blocks on another device: the same decoders, over torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gguf2st.gguf.blocks.base import BlockType

# A torch tensor.
Tensor = Any

_NO_FIELDS: Mapping[str, Any] = {}


class TensorBlocks:
    """Blocks whose bytes lie in a tensor, with fields to be had by name as those of numpy arrays.

    Unsigned integers of more than 8 bits, for which torch has no arithmetic, come as wider
    signed ones: int32 for 16 bits, int64 for 32.
    """

    def __init__(self, raw: Tensor, layout: np.dtype[np.void]) -> None:
        """Over uint8 (..., layout.itemsize)."""
        self._raw, self._layout = raw, layout

    def __len__(self) -> int:
        return len(self._raw)

    def __getitem__(self, name: str) -> Any:
        """The field of that name, a tensor (..., *field shape), or blocks where it has fields."""
        dtype, offset = (self._layout.fields or _NO_FIELDS)[name][:2]
        raw = self._raw[..., offset : offset + dtype.itemsize]
        base, shape = dtype.base, dtype.shape
        raw = raw.reshape(*self._raw.shape[:-1], *shape, base.itemsize)
        if base.fields is not None:
            return TensorBlocks(raw, base)
        return _numbers(raw, base)


def decode_on_device(
    kind: BlockType,
    raw: Tensor,
    columns: int,
    *,
    big_endian: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the values of some rows, on the device where their bytes are.

    All rows are decoded at once, which takes up to twelve bytes an element beside the result.

    Args:
        kind: how the tensor is stored.
        raw: torch uint8 (rows, columns / block_size * block_bytes), contiguous.
        columns: how many elements each row of `raw` holds.
        big_endian: whether the file is of a big-endian machine.
        out: where to put the values, float32 (rows, columns), contiguous.

    Returns:
        float32 (rows, columns), `out` if it was given: the bits that `decode_rows` gives,
        but for those of a NaN.

    Raises:
        ValueError: the shapes or dtypes don't fit together.
    """
    import torch  # noqa: PLC0415

    if columns < 0 or columns % kind.block_size:
        raise ValueError(f"{columns} columns aren't a whole number of {kind!r} blocks.")
    shape = len(raw), columns // kind.block_size * kind.block_bytes
    if raw.dtype != torch.uint8 or raw.shape != shape or not raw.is_contiguous():
        raise ValueError(
            f"Rows of {columns} columns in {kind!r} must be contiguous uint8 of shape {shape}, "
            f"not {raw.dtype} of shape {tuple(raw.shape)}."
        )
    if out is None:
        out = torch.empty((len(raw), columns), dtype=torch.float32, device=raw.device)
    if raw.numel():
        layout = kind.layout.newbyteorder(">") if big_endian else kind.layout
        blocks = TensorBlocks(raw.reshape(-1, kind.block_bytes), layout)
        kind.decode_into(blocks, out.reshape(-1, kind.block_size))
    return out


def _numbers(raw: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Bytes (..., itemsize) as numbers (...)."""
    import torch  # noqa: PLC0415

    if dtype.itemsize == 1:
        raw = raw[..., 0]
        return raw.view(torch.int8) if dtype.kind == "i" else raw
    if dtype.byteorder == ">":
        raw = raw.flip(-1)
    size = dtype.itemsize
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    numbers = raw.contiguous().view(whole)[..., 0]
    if dtype.kind == "f":
        return numbers.view({2: torch.float16, 4: torch.float32, 8: torch.float64}[size])
    if dtype.kind == "u":
        # Only as wide as they are: no type has unsigned integers of 64 bits.
        wider = torch.int32 if size == 2 else torch.int64
        return numbers.to(wider) & ((1 << 8 * size) - 1)
    return numbers
