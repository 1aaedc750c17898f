"""Blocks of a big-endian file decode to what their little-endian twins decode to."""

import gguf
import numpy as np
import pytest

from gguf2st.gguf.blocks import decode_rows
from tests.blocks.samples import KINDS, assert_same_bits, random_bytes

# (offset, width, count) of what ggml's C code reads as numbers of several bytes,
# taken by hand from ggml-common.h and the `dequantize_row_*` functions.
SWAPPED = {
    "F32": [(0, 4, 1)],
    "F16": [(0, 2, 1)],
    "BF16": [(0, 2, 1)],
    "F64": [(0, 8, 1)],
    "I8": [],
    "I16": [(0, 2, 1)],
    "I32": [(0, 4, 1)],
    "I64": [(0, 8, 1)],
    "Q4_0": [(0, 2, 1)],
    "Q4_1": [(0, 2, 2)],
    "Q5_0": [(0, 2, 1), (2, 4, 1)],
    "Q5_1": [(0, 2, 2), (4, 4, 1)],
    "Q8_0": [(0, 2, 1)],
    "Q1_0": [(0, 2, 1)],
    "Q2_0": [(0, 2, 1)],
    "Q2_K": [(80, 2, 2)],
    "Q3_K": [(108, 2, 1)],
    "Q4_K": [(0, 2, 2)],
    "Q5_K": [(0, 2, 2)],
    "Q6_K": [(208, 2, 1)],
    "TQ1_0": [(52, 2, 1)],
    "TQ2_0": [(64, 2, 1)],
    "MXFP4": [],
    "NVFP4": [],
    "IQ2_XXS": [(0, 2, 1), *((6 + 8 * group, 4, 1) for group in range(8))],
    "IQ2_XS": [(0, 2, 33)],
    "IQ2_S": [(0, 2, 1)],
    "IQ3_XXS": [(0, 2, 1), (66, 4, 8)],
    "IQ3_S": [(0, 2, 1)],
    "IQ1_S": [(0, 2, 1), (34, 2, 8)],
    "IQ1_M": [(48, 2, 4)],
    "IQ4_NL": [(0, 2, 1)],
    "IQ4_XS": [(0, 2, 2)],
}


def swap(raw: np.ndarray, places: list[tuple[int, int, int]]) -> np.ndarray:
    """Reverse the bytes of the numbers at the places of each block."""
    swapped = raw.copy()
    for offset, width, count in places:
        for start in range(offset, offset + width * count, width):
            swapped[:, start : start + width] = raw[:, start : start + width][:, ::-1]
    return swapped


@pytest.mark.parametrize("name", sorted(KINDS))
def test_big_endian_blocks(name):
    kind = KINDS[name]
    little = random_bytes(kind, 40, seed=1)
    big = swap(little, SWAPPED[name])
    columns = 4 * kind.block_size
    expected = decode_rows(kind, little.reshape(10, -1), columns)
    assert_same_bits(decode_rows(kind, big.reshape(10, -1), columns, big_endian=True), expected)
    blocks = big.view(kind.layout.newbyteorder(">"))[:, 0]
    assert_same_bits(kind.decode(blocks), expected)


def test_the_conversion_script_of_gguf_py_swaps_the_same_bytes():
    script = pytest.importorskip("gguf.scripts.gguf_convert_endian")
    compared = set()
    for code, swap_block in script.byteswap_tensors.items():
        name = gguf.GGMLQuantizationType(code).name
        little = random_bytes(KINDS[name], 5, seed=1)

        class Tensor:
            data = little.copy().reshape(-1)

        for start in range(0, little.size, little.shape[1]):
            swap_block(Tensor, start)
        assert np.array_equal(Tensor.data.reshape(little.shape), swap(little, SWAPPED[name])), name
        compared.add(name)
    assert {"Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"} <= compared
