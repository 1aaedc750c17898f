"""The inner loops of `packing`."""

from __future__ import annotations

import numpy as np

from gguf2st.jit import kernel

# Rows and columns of a tile that is transposed. What is read and written of it stays in the
# first cache: 128 codes of AWQ fill a line of 64 bytes of the output.
TILE_ROWS = 128
TILE_COLUMNS = 64


@kernel
def pack_rows_4(codes, words):
    """Pack along rows, the lowest nibble first; a last word that isn't full ends in zeros."""
    rows, columns = codes.shape
    whole = columns // 8
    for row in range(rows):
        source, target = codes[row], words[row]
        for index in range(whole):
            word = np.uint32(0)
            for slot in range(8):
                word |= np.uint32(source[8 * index + slot]) << np.uint32(4 * slot)
            target[index] = np.int32(word)
        if columns % 8:
            word = np.uint32(0)
            for slot in range(columns % 8):
                word |= np.uint32(source[8 * whole + slot]) << np.uint32(4 * slot)
            target[whole] = np.int32(word)


@kernel
def pack_awq(codes, out):
    """Pack eight rows into words in AWQ's order, and transpose."""
    rows, columns = codes.shape
    tile = np.empty((TILE_ROWS // 8, TILE_COLUMNS), np.int32)
    for first_row in range(0, rows, TILE_ROWS):
        words = min(TILE_ROWS, rows - first_row) // 8
        for first in range(0, columns, TILE_COLUMNS):
            width = min(TILE_COLUMNS, columns - first)
            for word in range(words):
                block = codes[
                    first_row + 8 * word : first_row + 8 * word + 8, first : first + width
                ]
                for column in range(width):
                    low = np.uint32(block[0, column]) | np.uint32(block[2, column]) << np.uint32(4)
                    low |= np.uint32(block[4, column]) << np.uint32(8)
                    low |= np.uint32(block[6, column]) << np.uint32(12)
                    high = np.uint32(block[1, column]) | np.uint32(block[3, column]) << np.uint32(4)
                    high |= np.uint32(block[5, column]) << np.uint32(8)
                    high |= np.uint32(block[7, column]) << np.uint32(12)
                    tile[word, column] = np.int32(low | high << np.uint32(16))
            for column in range(width):
                row = out[first + column, first_row // 8 : first_row // 8 + words]
                for word in range(words):
                    row[word] = tile[word, column]


@kernel
def transpose_words(words, out):
    """Transpose, tile by tile."""
    rows, columns = words.shape
    for first_row in range(0, rows, TILE_COLUMNS):
        stop_row = min(first_row + TILE_COLUMNS, rows)
        for first in range(0, columns, 16):
            for column in range(first, min(first + 16, columns)):
                target = out[column]
                for row in range(first_row, stop_row):
                    target[row] = words[row, column]
