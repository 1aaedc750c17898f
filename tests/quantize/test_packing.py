"""Layouts of packed codes, against compressed-tensors and against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf2st.quantize import (
    IntegerGrid,
    dequantize_rows,
    pack_awq,
    pack_gptq,
    pack_gptq_zeros,
    pack_nibbles,
    pack_rows,
    pack_zeros_down,
    quantize_rows,
)
from tests.quantize.oracle import compress, decompress, integer_args
from tests.quantize.samples import matrix

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # slot of a word -> column, awq/utils/packing_utils.py


def random_codes(rows: int, columns: int, bits: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, rows, columns])
    return rng.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)


def signed(codes: np.ndarray, bits: int) -> torch.Tensor:
    return torch.from_numpy((codes.astype(np.int16) - (1 << (bits - 1))).astype(np.int8))


def hexadecimal(words: np.ndarray) -> list[str]:
    assert words.dtype == np.int32
    return [f"0x{word:08x}" for word in words.view(np.uint32).reshape(-1)]


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Codes (out, in) of AWQ's [in, out / 8], slot by slot."""
    columns, count = words.shape
    codes = np.empty((count * 8, columns), np.uint8)
    for column in range(columns):
        for index in range(count):
            word = int(words[column, index]) & 0xFFFFFFFF
            for slot in range(8):
                codes[8 * index + AWQ_ORDER[slot], column] = word >> (4 * slot) & 15
    return codes


def unpack_gptq(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes (out, in) of GPTQ's [in * bits / 32, out]."""
    count, rows = words.shape
    per_word = 32 // bits
    codes = np.empty((rows, count * per_word), np.uint8)
    for slot in range(per_word):
        codes[:, slot::per_word] = (words >> (bits * slot) & ((1 << bits) - 1)).T
    return codes


def test_worked_examples():
    count = np.arange(8, dtype=np.uint8)
    assert hexadecimal(pack_rows(count[None], 4)) == ["0x76543210"]
    assert hexadecimal(pack_rows(count[None] + np.uint8(8), 4)) == ["0xfedcba98"]
    assert hexadecimal(pack_rows(np.full((1, 8), 8, np.uint8), 4)) == ["0x88888888"]
    assert hexadecimal(pack_rows(np.array([[0, 127, 128, 255]], np.uint8), 8)) == ["0xff807f00"]
    assert hexadecimal(pack_zeros_down(count[:, None], 4)) == ["0x76543210"]
    assert hexadecimal(pack_awq(count[:, None])) == ["0x75316420"]
    assert pack_awq(count[:, None]).tobytes() == bytes.fromhex("20643175")
    assert hexadecimal(pack_awq(np.full((8, 1), 8, np.uint8))) == ["0x88888888"]
    assert hexadecimal(pack_gptq(count[None], 4)) == ["0x76543210"]
    eights = np.full((8, 1), 8, np.uint8)
    assert hexadecimal(pack_gptq_zeros(eights, 4)) == ["0x77777777"]
    assert hexadecimal(pack_gptq_zeros(eights, 4, version=2)) == ["0x88888888"]
    assert pack_nibbles(np.array([[1, 10, 7, 15]], np.uint8)).tobytes() == bytes.fromhex("a1f7")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 8), (3, 32), (5, 31), (7, 33), (130, 100), (64, 576), (257, 129)]
)
def test_rows_and_zero_points_are_those_of_compressed_tensors(shape, bits):
    codes = random_codes(*shape, bits)
    for ours, axis in ((pack_rows(codes, bits), 1), (pack_zeros_down(codes, bits), 0)):
        theirs = pack_to_int32(signed(codes, bits), bits, packed_dim=axis)
        assert ours.dtype == np.int32
        assert ours.flags.c_contiguous
        assert np.array_equal(ours, theirs.numpy())
        back = unpack_from_int32(torch.from_numpy(ours), bits, torch.Size(shape), packed_dim=axis)
        assert np.array_equal(back.numpy(), signed(codes, bits))


@pytest.mark.parametrize(
    "shape", [(8, 1), (16, 3), (8, 65), (64, 64), (128, 130), (136, 63), (264, 17), (1024, 8)]
)
def test_awq_and_gptq_come_back(shape):
    codes = random_codes(*shape, 4)
    packed = pack_awq(codes)
    assert packed.shape == (shape[1], shape[0] // 8)
    assert packed.flags.c_contiguous
    assert np.array_equal(unpack_awq(packed), codes)
    across = np.ascontiguousarray(codes.T)
    assert np.array_equal(unpack_gptq(pack_gptq(across, 4), 4), across)
    eight = random_codes(shape[1], shape[0], 8)
    assert np.array_equal(unpack_gptq(pack_gptq(eight, 8), 8), eight)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_zero_points(bits):
    zeros = random_codes(40, 5, bits).clip(min=1)
    for version, stored in ((1, zeros - 1), (2, zeros)):
        packed = pack_gptq_zeros(zeros, bits, version)
        assert packed.shape == (5, 40 * bits // 32)
        theirs = pack_to_int32(signed(np.ascontiguousarray(stored.T), bits), bits)
        assert np.array_equal(packed, theirs.numpy())
    zeros[3, 3] = 0
    pack_gptq_zeros(zeros, bits, 2)
    with pytest.raises(ValueError, match="can't store a zero point of 0"):
        pack_gptq_zeros(zeros, bits)


def test_pieces_of_a_larger_array_are_filled():
    codes = random_codes(384, 96, 4)
    awq, gptq = np.zeros((96, 48), np.int32), np.zeros((12, 384), np.int32)
    for start in range(0, 384, 64):
        chunk = codes[start : start + 64]
        pack_awq(chunk, awq[:, start // 8 : start // 8 + 8])
        pack_gptq(chunk, 4, gptq[:, start : start + 64])
    assert np.array_equal(awq, pack_awq(codes))
    assert np.array_equal(gptq, pack_gptq(codes, 4))
    strided = np.ascontiguousarray(codes.T).T
    assert np.array_equal(pack_awq(strided), awq)
    assert np.array_equal(pack_rows(strided, 4), pack_rows(codes, 4))


def test_shapes_that_do_not_fit_are_refused():
    codes = random_codes(12, 12, 4)
    for call in (
        lambda: pack_awq(codes),
        lambda: pack_gptq(codes, 4),
        lambda: pack_gptq_zeros(codes, 4),
    ):
        with pytest.raises(ValueError, match=r"12 (rows|columns) of 4 bits don't fill words"):
            call()
    with pytest.raises(ValueError, match="3 bits can't be packed"):
        pack_rows(codes, 3)
    with pytest.raises(ValueError, match="can't be packed in pairs"):
        pack_nibbles(codes[:, :3])
    with pytest.raises(ValueError, match=r"out is int64 \(12, 1\), not int32 \(12, 1\)"):
        pack_awq(codes[:8], np.zeros((12, 1), np.int64))
    with pytest.raises(ValueError, match=r"out is int32 \(2, 8\), not int32 \(1, 8\)"):
        pack_gptq(codes[:8, :8], 4, np.zeros((2, 8), np.int32))


def test_nibbles_are_those_of_compressed_tensors():
    codes = random_codes(9, 64, 4)
    values = unpack_fp4_from_uint8(torch.from_numpy(pack_nibbles(codes)), 9, 64, torch.float32)
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    expected = sizes[codes & 7] * np.where(codes & 8, -1, 1)
    assert np.array_equal(values.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"),
    [(4, 32, False), (4, 128, True), (4, 0, False), (8, 32, True), (8, 0, True)],
)
def test_a_layer_is_that_of_the_pack_quantized_compressor(bits, group, symmetric):
    values = matrix(44, 256)
    values[0] = 0.01
    grid = IntegerGrid(bits, group, symmetric, "F16")
    args = integer_args(bits, group, symmetric, "F16")
    for fit in ("rtn", "search"):
        rows = quantize_rows(values, grid, fit=fit)
        state = {
            "weight": torch.from_numpy(values),
            "weight_scale": torch.from_numpy(rows.scales),
            "weight_zero_point": signed(rows.zeros, bits),
        }
        theirs = compress("pack-quantized", args, state)
        assert np.array_equal(pack_rows(rows.codes, bits), theirs["weight_packed"].numpy())
        ours = {
            "weight_packed": torch.from_numpy(pack_rows(rows.codes, bits)),
            "weight_scale": torch.from_numpy(rows.scales),
            "weight_shape": torch.tensor(values.shape),
        }
        if not symmetric:
            zeros = pack_zeros_down(rows.zeros, bits)
            assert np.array_equal(zeros, theirs["weight_zero_point"].numpy())
            ours["weight_zero_point"] = torch.from_numpy(zeros)
        back = decompress("pack-quantized", args, ours)["weight"]
        assert np.array_equal(back.numpy(), dequantize_rows(rows, grid))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 150), st.sampled_from([4, 8]), st.integers(0, 1 << 30))
def test_any_shape(words, columns, bits, seed):
    codes = random_codes(8 * words, columns, bits, seed)
    theirs = pack_to_int32(signed(codes, bits), bits)
    assert np.array_equal(pack_rows(codes, bits), theirs.numpy())
    across = np.ascontiguousarray(codes.T)
    assert np.array_equal(unpack_gptq(pack_gptq(across, bits), bits), across)
    if bits == 4:
        assert np.array_equal(unpack_awq(pack_awq(codes)), codes)
