"""Decoding with torch, bit for bit as with numpy."""

import numpy as np
import pytest
import torch

from gguf2st.gguf.blocks import decode_on_device, decode_rows
from tests.blocks.samples import KINDS, assert_same_bits, crafted_bytes, random_bytes, sound_bytes

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def blocks_of(name: str) -> np.ndarray:
    kind = KINDS[name]
    parts = [crafted_bytes(kind), random_bytes(kind, 400, seed=2), sound_bytes(kind, 400, seed=3)]
    return np.concatenate(parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_same_bits_as_with_numpy(name, big_endian, device):
    kind, raw = KINDS[name], blocks_of(name)
    raw = raw[: len(raw) // 4 * 4].reshape(4, -1)
    columns = raw.shape[1] // kind.block_bytes * kind.block_size
    expected = decode_rows(kind, raw, columns, big_endian=big_endian)
    given = torch.from_numpy(raw).to(device)
    found = decode_on_device(kind, given, columns, big_endian=big_endian)
    assert found.dtype == torch.float32
    assert_same_bits(found.cpu().numpy(), expected)
    out = torch.full((4, columns), 7.0, device=device)
    assert decode_on_device(kind, given, columns, big_endian=big_endian, out=out) is out
    assert_same_bits(out.cpu().numpy(), expected)
    assert torch.equal(given.cpu(), torch.from_numpy(raw))  # what is read isn't changed


def test_no_rows():
    for kind in KINDS.values():
        empty = torch.empty((0, 2 * kind.block_bytes), dtype=torch.uint8)
        assert decode_on_device(kind, empty, 2 * kind.block_size).shape == (0, 2 * kind.block_size)


def test_what_does_not_fit_is_refused():
    raw = torch.zeros((2, 144), dtype=torch.uint8)
    with pytest.raises(ValueError, match="100 columns aren't a whole number"):
        decode_on_device(KINDS["Q4_K"], raw, 100)
    for wrong in (raw[:, :143], raw.to(torch.int16), torch.zeros((4, 288)).byte()[::2, ::2]):
        with pytest.raises(ValueError, match=r"must be contiguous uint8 of shape \(2, 144\)"):
            decode_on_device(KINDS["Q4_K"], wrong, 256)
