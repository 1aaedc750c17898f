"""The few steps that the decoders share: split bytes into codes, look up, scale.

They take numpy arrays and torch tensors, and give back what they got; so one decoder
serves both. What the two do differently is in this file alone. Torch has next to no
arithmetic for unsigned integers of more than 8 bits: such fields are int32 or int64 there.

With numpy they work on strips of blocks: it is fast where one call runs over one long
piece of memory and slow where it starts anew every few bytes, so each step touches as few
short pieces as it can.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array, is_tensor, on_device_of, signed

# Arrays of uint8 and of float32.
Bytes = Array
Floats = Array


def split(packed: Bytes, bits: int, width: int) -> Bytes:
    """Split bytes into codes that are stored side by side in stretches.

    Of each stretch of `width` bytes, the lowest `bits` bits of all bytes come
    first, then the next `bits` bits of all bytes, and so on.

    Args:
        packed: uint8 (n, m), m a multiple of `width`.
        bits: 1, 2 or 4.
        width: 4 or a multiple of 8.

    Returns:
        uint8 (n, m * 8 / bits), each below 2 ** bits.
    """
    # Many bytes at a time: what a shift drags in from the next byte is masked away.
    size = 8 if width % 8 == 0 else 4
    mask = int.from_bytes(bytes([(1 << bits) - 1] * size))
    if is_tensor(packed):
        import torch  # noqa: PLC0415

        whole: Array = packed.contiguous().view(torch.int64 if size == 8 else torch.int32)
        shifts = torch.arange(0, 8, bits, device=packed.device, dtype=whole.dtype)
        shifted = whole.reshape(-1, 1, width // size) >> shifts[:, None]
        shifted &= mask
        return shifted.view(torch.uint8).reshape(len(packed), -1)
    word = np.uint64 if size == 8 else np.uint32
    words = np.ascontiguousarray(packed).view(word).reshape(-1, width // size)
    codes = np.empty((len(words), 8 // bits, width // size), word)
    for position in range(8 // bits):
        np.right_shift(words, word(position * bits), out=codes[:, position])
    codes &= word(mask)
    return codes.view(np.uint8).reshape(len(packed), -1)


def split_integers(words: Array, bits: int, count: int) -> Array:
    """Split each integer into codes, the lowest bits first.

    Args:
        words: unsigned integers (n, ...); bits beyond `count` codes are left out.
        bits: of a code.
        count: how many codes an integer holds.

    Returns:
        The dtype of `words`, (n, ..., count), each below 2 ** bits.
    """
    if is_tensor(words):
        import torch  # noqa: PLC0415

        shifts: Array = torch.arange(0, bits * count, bits, device=words.device, dtype=words.dtype)
    else:
        shifts = np.arange(0, bits * count, bits, dtype=words.dtype)
    codes = words[..., None] >> shifts
    codes &= (1 << bits) - 1
    return codes


def split_pairs(packed: Bytes) -> Bytes:
    """Split each byte into its low and its high four bits, as neighbours.

    Args:
        packed: uint8 (n, m).

    Returns:
        uint8 (n, 2 * m), each below 16.
    """
    return split_integers(packed, bits=4, count=2).reshape(len(packed), -1)


def single_bits(packed: Bytes) -> Bytes:
    """Split bytes into bits, the lowest bit of a byte first.

    Args:
        packed: uint8 (n, m).

    Returns:
        uint8 (n, 8 * m) of 0 and 1.
    """
    if is_tensor(packed):
        return split_integers(packed, bits=1, count=8).reshape(len(packed), -1)
    return np.unpackbits(packed, axis=1, bitorder="little")


def pair_table(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Prepare a look-up of two 4-bit codes at once, for `look_up_pairs`.

    Args:
        values: 16 integers from -128 to 127, one for each code.

    Returns:
        uint16, indexed by two neighbouring code bytes read as one uint16; an
        entry is the two int8 values in the order of the codes.
    """
    first, second = np.meshgrid(np.arange(16), np.arange(16), indexing="ij")
    codes = np.stack([first, second], axis=-1).astype(np.uint8)
    index = codes.view(np.uint16)[..., 0]
    table = np.zeros(0x0F10, np.uint16)
    table[index] = np.asarray(values, np.int8)[codes].view(np.uint16)[..., 0]
    return table


def look_up_pairs(codes: Bytes, table: npt.NDArray[np.uint16]) -> Array:
    """Replace 4-bit codes by their values.

    Args:
        codes: uint8 (n, m) below 16, contiguous, m even.
        table: what `pair_table` made.

    Returns:
        int8 (n, m).
    """
    if is_tensor(codes):
        import torch  # noqa: PLC0415

        return signed(look_up(table, codes.view(torch.int16)))
    return signed(look_up(table, codes.view(np.uint16)))


def look_up(table: npt.NDArray[Any], index: Array) -> Array:
    """Replace indices by entries of a table.

    Args:
        table: an array that lasts as long as the process: a copy is kept on each device.
        index: integers, each below the length of the table.

    Returns:
        The dtype of the table, in the shape of `index`. With torch, unsigned integers of
        more than 8 bits become signed ones of the same bits.
    """
    if is_tensor(index):
        copy = on_device_of(index, table)
        return copy.index_select(0, index.reshape(-1).int()).reshape(index.shape)
    # "clip" skips a bounds check that the range of the codes makes needless.
    return table.take(index, mode="clip")


def narrow(codes: Array) -> Bytes:
    """Integers below 256 as uint8."""
    if is_tensor(codes):
        import torch  # noqa: PLC0415

        return codes.to(torch.uint8)
    return codes.astype(np.uint8)


def indices(codes: Bytes) -> Array:
    """Integers of one byte as integers to which further bits can be added: uint16, or int32."""
    if is_tensor(codes):
        return codes.int()
    return codes.astype(np.uint16)


def integers(field: Array) -> Array:
    """A field of unsigned integers in the byte order of this machine, as `split_integers` takes it."""
    return field if is_tensor(field) else field.astype(field.dtype.newbyteorder("="))


def bytes_of(field: Array) -> Bytes:
    """The four bytes of each integer of a 32-bit field (n,), the lowest first: uint8 (n, 4)."""
    if is_tensor(field):
        import torch  # noqa: PLC0415

        return field[:, None].view(torch.uint8)[:, :4]
    return field.astype("<u4")[:, None].view(np.uint8)


def halves(bits: Array) -> Array:
    """The half-precision numbers with these bits, in the shape of `bits` (uint16, or int32)."""
    if is_tensor(bits):
        import torch  # noqa: PLC0415

        return bits.to(torch.int16).view(torch.float16)
    return bits.view(np.float16)


def float_bits(values: Floats) -> Array:
    """See float32 values as integers of 32 bits, without a copy."""
    if is_tensor(values):
        import torch  # noqa: PLC0415

        return values.view(torch.int32)
    return values.view(np.uint32)


def join(parts: list[Array]) -> Array:
    """Join arrays (n, ...) side by side."""
    if is_tensor(parts[0]):
        import torch  # noqa: PLC0415

        return torch.cat(parts, dim=1)
    return np.concatenate(parts, axis=1)


def widen(scale: Array) -> Floats:
    """Return the float32 values of a half-precision field, as a column (n, 1)."""
    return scale.float()[:, None] if is_tensor(scale) else scale.astype(np.float32)[:, None]


def half_more(scales: Array) -> Floats:
    """Integers and one half, as float32 of the same shape."""
    return (scales.float() if is_tensor(scales) else scales.astype(np.float32)) + 0.5


def write_scaled(out: Floats, codes: Array, scales: Floats, minima: Floats | None = None) -> None:
    """Write `codes * scales`, less `minima`, with one scale for each group.

    Args:
        out: float32 (n, m), contiguous.
        codes: integers (n, m) of one byte each.
        scales: float32 (n, groups), where groups divides m.
        minima: what to take off each element of a group, float32 (n, groups).
    """
    grouped = out.reshape(*scales.shape, -1)
    if is_tensor(out):
        import torch  # noqa: PLC0415

        torch.mul(codes.reshape(grouped.shape), scales[:, :, None], out=grouped)
    else:
        # Converting first and scaling in place is faster than one mixed-type product.
        np.copyto(out, codes)
        grouped *= scales[:, :, None]
    if minima is not None:
        grouped -= minima[:, :, None]
