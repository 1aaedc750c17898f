"""Turns the raw bytes of tensor rows into numbers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.buffers import Buffers
from gguf2st.gguf.blocks.base import BlockType
from gguf2st.gguf.blocks.kernels import kernel_of
from gguf2st.gguf.blocks.plain import BF16, PlainType
from gguf2st.rounding import Halves, round_values

# Of fewer elements at a time the calls themselves cost too much; the temporaries
# of more (up to ten bytes an element) leave a core's cache.
STRIP_ELEMENTS = 1 << 16


# With their blocks and what they become, so many values fit into a core's first cache.
CACHED_ELEMENTS = 1 << 12

# Fresh pages cost more than decoding.
_buffers = Buffers()


def decode_rows(
    kind: BlockType,
    raw: npt.NDArray[np.uint8],
    columns: int,
    *,
    big_endian: bool = False,
    out: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """Return the values of some rows of a tensor, or of a range of whole blocks of them.

    The rows are decoded strip by strip, so beyond the result the memory needed is
    about two megabytes (more only for very long rows that aren't contiguous).

    Args:
        kind: how the tensor is stored.
        raw: uint8 (rows, columns / block_size * block_bytes), with any strides; it
            is only read, so a view of a memory map will do.
        columns: how many elements each row of `raw` holds.
        big_endian: whether the file is of a big-endian machine. Then the fields of
            more than one byte are swapped, as ggml reads them there.
        out: where to put the values, to save memory that has to be fetched anew:
            float32 (rows, columns), contiguous.

    Returns:
        float32 (rows, columns), `out` if it was given. Of the types without
        blocks, I32, I64 and F64 are rounded to the nearest float32; `values_rows`
        doesn't round.

    Raises:
        ValueError: the shapes or dtypes don't fit together.
    """
    _check(kind, raw, columns)
    if out is None:
        out = np.empty((len(raw), columns), np.float32)
    elif out.shape != (len(raw), columns) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(
            f"The array for the values must be contiguous float32 of shape "
            f"{(len(raw), columns)}, not {out.dtype} of shape {out.shape}."
        )
    values, start = out.reshape(-1), 0
    for strip in _strips(raw, kind, cut=big_endian or kernel_of(kind) is None):
        count = strip.size // kind.block_bytes * kind.block_size
        _decode(kind, strip, values[start : start + count], big_endian=big_endian)
        start += count
    return out


def decode_rounded(
    kind: BlockType,
    raw: npt.NDArray[np.uint8],
    columns: int,
    dtype: str,
    out: Halves,
    *,
    big_endian: bool = False,
) -> int:
    """Write the values of some rows, rounded once to 16 bits.

    As `decode_rows`, then `rounding.round_values`, without the float32 values of more than a
    strip.

    Args:
        kind: as for `decode_rows`.
        raw: as for `decode_rows`.
        columns: as for `decode_rows`.
        dtype: "BF16" or "F16".
        out: (rows, columns), contiguous: uint16 for BF16, float16 for F16.
        big_endian: as for `decode_rows`.

    Returns:
        How many of the results aren't finite.

    Raises:
        ValueError: the shapes or dtypes don't fit together.
    """
    _check(kind, raw, columns)
    expected = np.dtype(np.uint16 if dtype == "BF16" else np.float16)
    if out.shape != (len(raw), columns) or out.dtype != expected or not out.flags.c_contiguous:
        raise ValueError(
            f"The array for {dtype} must be contiguous {expected} of shape {(len(raw), columns)}, "
            f"not {out.dtype} of shape {out.shape}."
        )
    target, start, broken = out.reshape(-1), 0, 0
    fused = not big_endian and kernel_of(kind) is not None and kind.block_size > 1
    for strip in _strips(raw, kind, cut=not fused):
        stop = start + strip.size // kind.block_bytes * kind.block_size
        if fused:
            broken += _round_blocks(kind, strip, dtype, target[start:stop])
        else:
            values = _buffers.take("values", (stop - start,), np.float32)
            _decode(kind, strip, values, big_endian=big_endian)
            broken += round_values(values, dtype, target[start:stop])
        start = stop
    return broken


def _round_blocks(
    kind: BlockType, strip: npt.NDArray[np.uint8], dtype: str, out: npt.NDArray[Any]
) -> int:
    from gguf2st.gguf.blocks.kernels import fused  # noqa: PLC0415  # importing numba takes a while

    kernel = fused.to_bfloat16 if dtype == "BF16" else fused.to_float16
    scratch = _buffers.take("scratch", (CACHED_ELEMENTS,), np.float32)
    decoder = fused.decoder_of(kind.name)
    target = out.view(np.uint16)
    return int(kernel(decoder, strip, target, scratch, kind.block_bytes, kind.block_size))


def _decode(
    kind: BlockType,
    strip: npt.NDArray[np.uint8],
    values: npt.NDArray[np.float32],
    *,
    big_endian: bool,
) -> None:
    """Decode contiguous blocks: uint8 (n * block_bytes,) to float32 (n * block_size,)."""
    kernel = None if big_endian else kernel_of(kind)
    if kernel is not None:
        kernel(strip, values)
        return
    with np.errstate(invalid="ignore", over="ignore"):
        blocks = strip.view(_layout(kind, big_endian=big_endian))
        kind.decode_into(blocks, values.reshape(-1, kind.block_size))


def values_rows(
    kind: BlockType, raw: npt.NDArray[np.uint8], columns: int, *, big_endian: bool = False
) -> npt.NDArray[Any]:
    """Return the values of some rows in the dtype in which they are stored.

    Args:
        kind: F16, F32, F64, I8, I16, I32 or I64.
        raw: as for `decode_rows`.
        columns: as for `decode_rows`.
        big_endian: as for `decode_rows`.

    Returns:
        An array (rows, columns) of the type's own dtype in this machine's byte
        order. It shares the memory of `raw` if that is possible: copy it before
        you change it.

    Raises:
        ValueError: the shapes or dtypes don't fit together, or numpy has no dtype
            for the values (BF16 and every type with scales).
    """
    if not isinstance(kind, PlainType) or isinstance(kind, BF16):
        raise ValueError(f"Numpy has no dtype for {kind.name}; decode_rows gives its values.")
    _check(kind, raw, columns)
    stored = np.ascontiguousarray(raw).view(_layout(kind, big_endian=big_endian)["value"])
    return stored.astype(stored.dtype.newbyteorder("="), copy=False)


def _layout(kind: BlockType, *, big_endian: bool) -> np.dtype[np.void]:
    """Return the block layout of a type for a file's byte order."""
    return kind.layout.newbyteorder(">") if big_endian else kind.layout


def _check(kind: BlockType, raw: npt.NDArray[np.uint8], columns: int) -> None:
    """Raise ValueError if `raw` can't be rows of so many columns."""
    if columns < 0 or columns % kind.block_size:
        raise ValueError(f"{columns} columns aren't a whole number of {kind!r} blocks.")
    row_bytes = columns // kind.block_size * kind.block_bytes
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != row_bytes:
        raise ValueError(
            f"Rows of {columns} columns in {kind!r} must be uint8 of shape (rows, {row_bytes}), "
            f"not {raw.dtype} of shape {raw.shape}."
        )


def _strips(
    raw: npt.NDArray[np.uint8], kind: BlockType, *, cut: bool
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of the rows in order, as contiguous pieces of whole blocks.

    Unless they are to be `cut`, contiguous rows are one piece.
    """
    strip_bytes = max(1, STRIP_ELEMENTS // kind.block_size) * kind.block_bytes
    if raw.size == 0:
        return
    if raw.flags.c_contiguous:
        raw = raw.reshape(1, -1)
        if not cut and raw.flags.writeable:
            strip_bytes = raw.size
    rows_at_once = max(1, strip_bytes // raw.shape[1])
    for row in range(0, len(raw), rows_at_once):
        piece = np.ascontiguousarray(raw[row : row + rows_at_once]).reshape(-1)
        for start in range(0, piece.size, strip_bytes):
            strip = piece[start : start + strip_bytes]
            # For kernels, an array that can't be written to is one of another type.
            yield strip if strip.flags.writeable else strip.copy()
