"""Codes packed into words of 32 bits; see `gguf2st.quantize.packing` for the layouts."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack along rows: uint8 (rows, columns) to int32 (rows, ceil(columns * bits / 32))."""
    padding = -codes.shape[1] % (32 // bits)
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    packed = pack_nibbles(codes) if bits == 4 else codes.contiguous()
    return packed.view(torch.int32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes: uint8 (rows, columns) to uint8 (rows, columns / 2)."""
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


def pack_awq(codes: Tensor) -> Tensor:
    """Transpose and pack: uint8 (rows, columns) to int32 (columns, rows / 8)."""
    rows, columns = codes.shape
    # Row 4 * a + 2 * b + c of eight: nibbles of a word are in the order of c, a, b.
    parts = codes.reshape(rows // 8, 2, 2, 2, columns)
    packed = parts[:, :, 0] | parts[:, :, 1] << 4
    return packed.permute(3, 0, 2, 1).reshape(columns, rows // 2).view(torch.int32)
