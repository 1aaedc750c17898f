"""Rows as a caller has them: memory maps, slices, long and short ones."""

import numpy as np
import pytest

from gguf2st.gguf.blocks import block_type_by_name, decode_rows, rows
from tests.blocks.samples import KINDS, assert_same_bits, sound_bytes

Q4_K = block_type_by_name("Q4_K")


def some_rows(kind, count, blocks_each, seed=1):
    raw = sound_bytes(kind, count * blocks_each, seed).reshape(count, -1)
    return raw, blocks_each * kind.block_size


@pytest.mark.parametrize("name", sorted(KINDS))
def test_rows_are_their_blocks_side_by_side(name):
    kind = KINDS[name]
    raw, columns = some_rows(kind, 7, 3)
    expected = kind.decode(raw.reshape(-1, kind.block_bytes).view(kind.layout)[:, 0])
    found = decode_rows(kind, raw, columns)
    assert found.shape == (7, columns)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_slices_of_rows_and_of_blocks(name):
    kind = KINDS[name]
    raw, columns = some_rows(kind, 9, 5)
    whole = decode_rows(kind, raw, columns)
    some = slice(1 * kind.block_bytes, 4 * kind.block_bytes)
    part = whole[:, kind.block_size : 4 * kind.block_size]
    assert_same_bits(decode_rows(kind, raw[::2], columns), whole[::2])
    assert_same_bits(decode_rows(kind, raw[::-3], columns), whole[::-3])
    assert_same_bits(decode_rows(kind, raw[:, some], 3 * kind.block_size), part)
    assert_same_bits(decode_rows(kind, raw[2:9:3, some], 3 * kind.block_size), part[2:9:3])
    assert_same_bits(decode_rows(kind, np.asfortranarray(raw), columns), whole)


def test_a_read_only_memory_map_at_an_odd_offset(tmp_path):
    raw, columns = some_rows(Q4_K, 4, 2)
    path = tmp_path / "rows"
    path.write_bytes(b"odd" + raw.tobytes())
    mapped = np.memmap(path, np.uint8, "r", offset=3, shape=raw.shape)
    found = decode_rows(Q4_K, mapped, columns)
    assert type(found) is np.ndarray
    assert_same_bits(found, decode_rows(Q4_K, raw, columns))


@pytest.mark.parametrize("strip", [1, 256, 700, 1536, 4000])
@pytest.mark.parametrize("step", [1, 2])
def test_where_strips_begin_makes_no_difference(strip, step, monkeypatch):
    raw, columns = some_rows(Q4_K, 10, 3)
    expected = decode_rows(Q4_K, raw, columns)[::step]
    monkeypatch.setattr(rows, "STRIP_ELEMENTS", strip)
    assert_same_bits(decode_rows(Q4_K, raw[::step], columns), expected)


def test_the_callers_array_is_filled_and_returned():
    raw, columns = some_rows(Q4_K, 4, 2)
    out = np.full((4, columns), np.nan, np.float32)
    assert decode_rows(Q4_K, raw, columns, out=out) is out
    assert_same_bits(out, decode_rows(Q4_K, raw, columns))


@pytest.mark.parametrize("shape", [(0, 288), (3, 0), (0, 0)])
def test_nothing_to_decode(shape):
    columns = shape[1] // 144 * 256
    assert decode_rows(Q4_K, np.empty(shape, np.uint8), columns).shape == (shape[0], columns)


@pytest.mark.parametrize(
    ("raw", "columns"),
    [
        (np.zeros((2, 144), np.uint8), 255),
        (np.zeros((2, 144), np.uint8), -256),
        (np.zeros((2, 143), np.uint8), 256),
        (np.zeros((2, 288), np.uint8), 256),
        (np.zeros(288, np.uint8), 512),
        (np.zeros((2, 144), np.int8), 256),
        (np.zeros((2, 72), np.uint16), 256),
    ],
)
def test_shapes_that_do_not_fit(raw, columns):
    with pytest.raises(ValueError, match="Q4_K"):
        decode_rows(Q4_K, raw, columns)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 255), np.float32),
        np.zeros((2, 256), np.float64),
        np.zeros((4, 256), np.float32)[::2],
    ],
)
def test_an_array_for_the_values_that_does_not_fit(out):
    with pytest.raises(ValueError, match="contiguous float32"):
        decode_rows(Q4_K, np.zeros((2, 144), np.uint8), 256, out=out)


def test_bad_scales_give_no_warnings(recwarn):
    raw = np.full((2, 144), 255, np.uint8)
    assert np.isnan(decode_rows(Q4_K, raw, 256)).all()
    assert not recwarn.list
