"""The look-up tables of the IQ types: which few vectors their codes stand for.

The vectors are part of the file format and follow no formula, so they lie in
`grids.npz`, which fixtures/make_grids.py makes out of ggml's tables. Each table
here has one unsigned integer an entry, so that a look-up moves one number; its
bytes in memory are the int8 elements of the vector.
"""

from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.unsignedinteger[Any]]


@cache
def magnitudes(name: str) -> Table:
    """Return the table of one type's vectors.

    Args:
        name: an array of grids.npz: "iq2_xxs", "iq2_xs", "iq2_s" (8 elements an
            entry), "iq3_xxs" or "iq3_s" (4 elements).

    Returns:
        uint64 or uint32, one entry for each index that a block can hold. The
        elements are positive; the signs come from elsewhere.
    """
    return _one_integer_each(_stored(name))


@cache
def shifted_eighths() -> Table:
    """Return the vectors of IQ1_S and IQ1_M in units of one eighth.

    The format moves each vector of -1, 0 and 1 up or down by one eighth
    (`IQ1S_DELTA` in ggml-common.h). Entry i is vector i moved up, entry 2048 + i
    the same vector moved down.

    Returns:
        uint64 (4096,), eight int8 an entry.
    """
    eighths = _stored("iq1_s") * np.int8(8)
    return _one_integer_each(np.concatenate([eighths + np.int8(1), eighths - np.int8(1)]))


@cache
def signs(elements: int) -> Table:
    """Return +1 or -1 for the bits of a byte, the lowest bit first.

    Args:
        elements: 8 for the whole byte, 4 for the low half only.

    Returns:
        `elements` int8 an entry, in uint64 (256,) or uint32 (16,); a set bit is -1.
    """
    bits = np.arange(2**elements)[:, None] >> np.arange(elements)
    return _one_integer_each((1 - 2 * (bits & 1)).astype(np.int8))


@cache
def signs_of_seven() -> Table:
    """Return eight signs for seven bits; the eighth makes the count of -1 even.

    The same as ggml's `ksigns_iq2xs`.

    Returns:
        uint64 (128,), eight int8 an entry.
    """
    seven = np.arange(128)
    parity = ((seven[:, None] >> np.arange(7)) & 1).sum(axis=1) & 1
    table: Table = signs(8).take(seven | parity << 7)
    return table


def _one_integer_each(vectors: npt.NDArray[np.int8]) -> Table:
    """View int8 (entries, 4 or 8) as one unsigned integer for each entry."""
    table: Table = np.ascontiguousarray(vectors).view(f"u{vectors.shape[1]}")[:, 0]
    return table


def _stored(name: str) -> npt.NDArray[np.int8]:
    """Read one array of grids.npz, int8 (entries, elements)."""
    with (
        files("gguf2st.gguf.blocks").joinpath("grids.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        vectors: npt.NDArray[np.int8] = arrays[name]
    return vectors
