"""The types that hold numbers as they are."""

import numpy as np
import pytest

from gguf2st.gguf.blocks import block_type_by_name, decode_rows, values_rows
from tests.blocks.samples import KINDS, assert_same_bits

DTYPES = {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
NUMBERS = np.array([[0, 1, -1, 100, -128, 127], [3, -3, 8, 90, 7, -77]])


def raw_of(numbers: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(numbers.astype(dtype)).view(np.uint8)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("big_endian", [False, True])
def test_numbers_come_back_in_both_ways(name, big_endian):
    dtype = DTYPES[name].replace("<", ">") if big_endian else DTYPES[name]
    kind, raw = KINDS[name], raw_of(NUMBERS, dtype)
    decoded = decode_rows(kind, raw, 6, big_endian=big_endian)
    values = values_rows(kind, raw, 6, big_endian=big_endian)
    assert decoded.dtype == np.float32
    assert values.dtype == np.dtype(DTYPES[name]).newbyteorder("=")
    assert np.array_equal(decoded, NUMBERS)
    assert np.array_equal(values, NUMBERS)


def test_large_numbers_are_rounded_once_and_values_are_not():
    kind = block_type_by_name("I64")
    numbers = np.array([[2**24 + 1, 2**24 + 3, -(2**62) - 1]])
    raw = raw_of(numbers, "<i8")
    assert decode_rows(kind, raw, 3).tolist() == [[2.0**24, 2.0**24 + 4, -(2.0**62)]]
    assert np.array_equal(values_rows(kind, raw, 3), numbers)


def test_a_double_beyond_single_precision_becomes_infinite_without_a_warning():
    kind = block_type_by_name("F64")
    raw = raw_of(np.array([[1e300, -1e300, 1e-300]]), "<f8")
    assert decode_rows(kind, raw, 3).tolist() == [[np.inf, -np.inf, 0.0]]


def test_every_half_and_every_brain_float():
    bits = np.arange(65536, dtype="<u2")
    raw = bits.view(np.uint8).reshape(1, -1)
    halves = decode_rows(block_type_by_name("F16"), raw, 65536)
    assert_same_bits(halves, bits.view("<f2").astype(np.float32))
    brain = decode_rows(block_type_by_name("BF16"), raw, 65536)
    assert np.array_equal(brain.view(np.uint32)[0], bits.astype(np.uint32) << 16)


def test_the_bits_of_a_single_stay_even_in_nan():
    bits = np.array([[0x7F800001, 0xFFC12345, 0x80000000]], "<u4")
    decoded = decode_rows(block_type_by_name("F32"), bits.view(np.uint8), 3)
    assert np.array_equal(decoded.view(np.uint32), bits)


@pytest.mark.parametrize("name", ["BF16", "Q8_0"])
def test_values_need_a_dtype(name):
    with pytest.raises(ValueError, match=f"no dtype for {name}"):
        values_rows(KINDS[name], np.zeros((1, 68), np.uint8), 64)
