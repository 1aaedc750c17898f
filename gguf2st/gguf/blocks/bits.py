"""The few steps that the decoders share: split bytes into codes, look up, scale.

They work on whole strips of blocks. Numpy is fast where one call runs over one
long piece of memory and slow where it starts anew every few bytes, so each step
touches as few short pieces as it can.
"""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint8] | npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]

NIBBLES = np.array([0, 4], np.uint8)
"""How far to shift a byte to get its low and its high four bits."""


def split(packed: npt.NDArray[np.uint8], bits: int, width: int) -> Bytes:
    """Split bytes into codes that are stored side by side in stretches.

    Of each stretch of `width` bytes, the lowest `bits` bits of all bytes come
    first, then the next `bits` bits of all bytes, and so on.

    Args:
        packed: uint8 (n, m), m a multiple of `width`.
        bits: 1, 2 or 4.
        width: a multiple of 8.

    Returns:
        uint8 (n, m * 8 / bits), each below 2 ** bits.
    """
    # Eight bytes at a time: what a shift drags in from the next byte is masked away.
    words = np.ascontiguousarray(packed).view(np.uint64).reshape(-1, width // 8)
    codes = np.empty((len(words), 8 // bits, width // 8), np.uint64)
    for position in range(8 // bits):
        np.right_shift(words, np.uint64(position * bits), out=codes[:, position])
    codes &= np.uint64(0x0101010101010101 * ((1 << bits) - 1))
    return codes.view(np.uint8).reshape(len(packed), -1)


def split_pairs(packed: npt.NDArray[np.uint8]) -> Bytes:
    """Split each byte into its low and its high four bits, as neighbours.

    Args:
        packed: uint8 (n, m).

    Returns:
        uint8 (n, 2 * m), each below 16.
    """
    halves = packed[:, :, None] >> NIBBLES
    halves &= np.uint8(15)
    return halves.reshape(len(packed), -1)


def single_bits(packed: npt.NDArray[np.uint8]) -> Bytes:
    """Split bytes into bits, the lowest bit of a byte first.

    Args:
        packed: uint8 (n, m).

    Returns:
        uint8 (n, 8 * m) of 0 and 1.
    """
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


def look_up_pairs(codes: Bytes, table: npt.NDArray[np.uint16]) -> npt.NDArray[np.int8]:
    """Replace 4-bit codes by their values.

    Args:
        codes: uint8 (n, m) below 16, contiguous, m even.
        table: what `pair_table` made.

    Returns:
        int8 (n, m).
    """
    # "clip" skips a bounds check that the range of the codes makes needless.
    return table.take(codes.view(np.uint16), mode="clip").view(np.int8)


def widen(scale: npt.NDArray[np.float16]) -> Floats:
    """Return the float32 values of a half-precision field, as a column (n, 1)."""
    return scale.astype(np.float32)[:, None]


def write_scaled(out: Floats, codes: Codes, scales: Floats, minima: Floats | None = None) -> None:
    """Write `codes * scales`, less `minima`, with one scale for each group.

    Args:
        out: float32 (n, m), contiguous.
        codes: integers (n, m) of one byte each.
        scales: float32 (n, groups), where groups divides m.
        minima: what to take off each element of a group, float32 (n, groups).
    """
    grouped = out.reshape(*scales.shape, -1)
    # Converting first and scaling in place is faster than one mixed-type product.
    np.copyto(out, codes)
    grouped *= scales[:, :, None]
    if minima is not None:
        grouped -= minima[:, :, None]
