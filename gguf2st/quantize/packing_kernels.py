"""The inner loops of `packing`.

They take whole tiles. Where the last one isn't whole it begins further ahead, and writes some words
once more, so each side of a matrix has to be that of a tile at least.
"""

from gguf2st.jit import kernel
from gguf2st.vectors import (
    bytes_of,
    choose,
    formula,
    integers,
    load,
    paired,
    some_lanes,
    store,
    transpose,
    transposed,
)

CODES = 32  # codes that are packed at once
TILE = 16  # rows and columns of a tile that is transposed
AWQ_ROWS = 64  # rows of a tile that is packed: their words fill half a line of a cache
# Rows whose codes of a column share a word: these make up its bytes.
_AWQ_BYTES = ((0, 2), (4, 6), (1, 3), (5, 7))


@formula
def _tile(start, size, length):
    """Where a tile begins that would begin at `start` if the side were long enough."""
    return choose(start + length <= size, start, size - length)


@formula
def _pack_some(codes, place, out):
    pairs = paired(load(codes, place, CODES))
    store(out, place >> 1, bytes_of(integers(pairs | pairs >> 4)))


@formula
def _pack_awq_tile(codes, start, columns, out, to, distance):
    words = []
    for first in range(0, AWQ_ROWS, 8):
        rows = [load(codes, start + (first + row) * columns, TILE) for row in range(8)]
        word, *others = (integers(rows[low] | rows[high] << 4) for low, high in _AWQ_BYTES)
        for number, byte in enumerate(others):
            word = word | byte << 8 * number + 8
        words.append(word)
    half = AWQ_ROWS // 8
    for pair, vector in enumerate(transposed(words)):
        for side in (0, 1):
            column = 2 * pair + side
            store(out, to + distance * column, some_lanes(vector, half * side, half))


@kernel
def pack_pairs(codes, out):
    """Pack pairs of 4-bit codes, uint8, into bytes, the first in the low nibble; at least CODES."""
    for start in range(0, codes.size, CODES):
        _pack_some(codes, _tile(start, codes.size, CODES), out)


@kernel
def pack_awq(codes, columns, out, distance):
    """Pack eight rows into words in AWQ's order, and transpose.

    `codes`, uint8, are those of a matrix, row by row, and `out`, int32, the memory of another, whose rows
    lie `distance` apart. At least AWQ_ROWS rows and TILE columns.
    """
    rows = codes.size // columns
    for first_row in range(0, rows, AWQ_ROWS):
        row = _tile(first_row, rows, AWQ_ROWS)
        for first in range(0, columns, TILE):
            column = _tile(first, columns, TILE)
            to = column * distance + row // 8
            _pack_awq_tile(codes, row * columns + column, columns, out, to, distance)


@kernel
def transpose_words(words, columns, out, distance):
    """Transpose a matrix of int32, given and taken in the same way; at least TILE rows and columns."""
    rows = words.size // columns
    for first_row in range(0, rows, TILE):
        row = _tile(first_row, rows, TILE)
        for first in range(0, columns, TILE):
            column = _tile(first, columns, TILE)
            transpose(
                words, row * columns + column, columns, out, column * distance + row, distance
            )
