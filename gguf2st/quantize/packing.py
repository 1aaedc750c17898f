"""How codes lie in the tensors of each format.

Codes and zero points are unsigned here, as `IntegerRows` holds them: uint8, below
2 ** bits. Words are int32, filled from their lowest bits on, little-endian in a file.

Sources: compressed_tensors/compressors/pack_quantized/helpers.py (`pack_to_int32`),
AutoAWQ's awq/modules/linear/gemm.py (`WQLinear_GEMM.from_linear`), AutoGPTQ's
auto_gptq/nn_modules/qlinear (`pack`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gguf2st.arrays import Array, is_tensor
from gguf2st.quantize import packing_kernels as kernels

# Numpy arrays of uint8 and int32, or torch tensors of them.
Codes = Array
Words = Array


def pack_rows(codes: Codes, bits: int) -> Words:
    """Pack along rows: element i of a row goes to bit i * bits.

    This is compressed-tensors' `weight_packed`.

    Args:
        codes: uint8 (rows, columns).
        bits: 4 or 8.

    Returns:
        int32 (rows, ceil(columns * bits / 32)); a last word that isn't full ends in zeros.
    """
    if bits not in (4, 8):
        raise ValueError(f"codes of {bits} bits can't be packed, only of 4 and 8")
    if is_tensor(codes):
        from gguf2st.quantize import device  # noqa: PLC0415

        return device.pack_rows(codes, bits)
    per_word = 32 // bits
    missing = -codes.shape[1] % per_word
    if missing:
        codes = np.pad(codes, ((0, 0), (0, missing)))
    packed = pack_nibbles(codes) if bits == 4 else np.ascontiguousarray(codes)
    return packed.view("<i4").astype(np.int32, copy=False)


def pack_nibbles(codes: Codes) -> Codes:
    """Pack pairs of 4-bit codes into bytes, the even column in the low nibble.

    Args:
        codes: uint8 (rows, columns), each below 16; 2 divides columns.

    Returns:
        uint8 (rows, columns / 2).
    """
    if codes.shape[1] % 2:
        raise ValueError(f"{codes.shape[1]} columns can't be packed in pairs")
    if is_tensor(codes):
        from gguf2st.quantize import device  # noqa: PLC0415

        return device.pack_nibbles(codes)
    flat = np.ascontiguousarray(codes).ravel()
    if flat.size < kernels.CODES:
        flat = np.pad(flat, (0, kernels.CODES - flat.size))
    packed = np.empty(flat.size // 2, np.uint8)
    kernels.pack_pairs(flat, packed)
    return packed[: codes.size // 2].reshape(codes.shape[0], -1)


def pack_zeros_down(zeros: Codes, bits: int) -> Words:
    """Pack zero points along the first axis: compressed-tensors' `weight_zero_point`.

    Args:
        zeros: uint8 (rows, groups).
        bits: 4 or 8.

    Returns:
        int32 (ceil(rows * bits / 32), groups).
    """
    words = pack_rows(zeros.T, bits).T
    return words.contiguous() if is_tensor(words) else np.ascontiguousarray(words)


def pack_awq(codes: Codes, out: Words | None = None) -> Words:
    """Transpose and pack 4-bit codes or zero points: AWQ's `qweight` and `qzeros`.

    A word of an input column holds eight neighbouring rows, in the order 0, 2, 4, 6, 1, 3,
    5, 7 from its lowest bits on.

    Args:
        codes: uint8 (rows, columns), that is (out, in) or (out, groups); 8 divides rows.
        out: where to put the result, such as some columns of a larger array.

    Returns:
        int32 (columns, rows / 8).
    """
    rows = codes.shape[0]
    if rows % 8:
        raise ValueError(f"{rows} rows of 4 bits don't fill words of 32 bits")
    if is_tensor(codes):
        from gguf2st.quantize import device  # noqa: PLC0415

        return _copied(device.pack_awq(codes), out)
    return _transposed(kernels.pack_awq, codes, (kernels.AWQ_ROWS, kernels.TILE), 8, out)


def pack_gptq(codes: Codes, bits: int, out: Words | None = None) -> Words:
    """Transpose and pack codes: GPTQ's `qweight`.

    A word of an output row holds neighbouring columns, in their order.

    Args:
        codes: uint8 (rows, columns), that is (out, in); 32 / bits divides columns.
        bits: 4 or 8.
        out: where to put the result, such as some columns of a larger array.

    Returns:
        int32 (columns * bits / 32, rows).
    """
    if codes.shape[1] * bits % 32:
        raise ValueError(f"{codes.shape[1]} columns of {bits} bits don't fill words of 32 bits")
    words = pack_rows(codes, bits)
    if is_tensor(words):
        return _copied(words.T, out)
    return _transposed(kernels.transpose_words, words, (kernels.TILE, kernels.TILE), 1, out)


def pack_gptq_zeros(zeros: Codes, bits: int, version: int = 1) -> Words:
    """Transpose and pack zero points: GPTQ's `qzeros`.

    Args:
        zeros: uint8 (rows, groups); 32 / bits divides rows.
        bits: 4 or 8.
        version: of the format. 1 ("gptq") stores zero points less one, and can't store 0;
            2 ("gptq_v2") stores them as they are.

    Returns:
        int32 (groups, rows * bits / 32).
    """
    if zeros.shape[0] * bits % 32:
        raise ValueError(f"{zeros.shape[0]} rows of {bits} bits don't fill words of 32 bits")
    if version == 1:
        if len(zeros) and not zeros.min():
            raise ValueError("GPTQ's first version can't store a zero point of 0")
        zeros = zeros - 1
    return pack_rows(zeros.T, bits)


def _transposed(
    kernel: Callable[..., None],
    codes: Codes,
    tile: tuple[int, int],
    per_word: int,
    out: Words | None,
) -> Words:
    """What a kernel that packs `per_word` rows into a word and transposes makes of a matrix.

    The kernel needs a tile at least. It writes to `out` where that was given.
    """
    rows, columns = codes.shape
    shape = columns, rows // per_word
    if out is None:
        out = np.empty(shape, np.int32)
    _check(out, shape)
    height, width = (max(side, least) for side, least in zip(codes.shape, tile, strict=True))
    target, whole = out, (height, width) == codes.shape and out.strides[1] == out.itemsize
    if not whole:
        codes = np.pad(codes, ((0, height - rows), (0, width - columns)))
        target = np.empty((width, height // per_word), np.int32)
    distance = target.strides[0] // target.itemsize
    size = (len(target) - 1) * distance + target.shape[1]
    memory = np.lib.stride_tricks.as_strided(target, (size,), (target.itemsize,))
    kernel(np.ascontiguousarray(codes).ravel(), width, memory, distance)
    if not whole:
        out[...] = target[:columns, : shape[1]]
    return out


def _copied(words: Words, out: Words | None) -> Words:
    """The words of a tensor in `out`, if it was given."""
    if out is None:
        return words.contiguous()
    _check(out, tuple(words.shape))
    out.copy_(words)
    return out


def _check(out: Words, shape: tuple[int, ...]) -> None:
    if tuple(out.shape) != shape or str(out.dtype).removeprefix("torch.") != "int32":
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not int32 {shape}")
