"""What formulas compute in compiled code, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from gguf2st.jit import kernel
from gguf2st.vectors import (
    absolute,
    bits_of,
    branch,
    bytes_of,
    choose,
    count_up,
    doubles,
    downward,
    every,
    floats,
    formula,
    from_bits,
    halves_of,
    integers,
    join,
    lane,
    larger,
    load,
    load_halves,
    look_up,
    loop,
    multiply_add,
    nearest,
    paired,
    repeat,
    signed,
    smaller,
    some_lanes,
    store,
    transpose,
    transposed,
    widen_half,
    word16,
    word32,
)

RNG = np.random.default_rng(1)
A, B = (RNG.standard_normal(16).astype(np.float32) for _ in range(2))
BYTES = RNG.integers(0, 256, 64).astype(np.uint8)
TABLE = tuple(int(entry) for entry in RNG.integers(-128, 128, 16))


@kernel
def real(a, b, out):
    x, y = load(a, 0, 16), load(b, 0, 16)
    store(out, 0, x + y)
    store(out, 16, x - y * 3)
    store(out, 32, x / y)
    store(out, 48, choose(x < y, x, 0))
    store(out, 64, smaller(x, y) * larger(x, 0.25))
    store(out, 80, multiply_add(x, y, x))
    store(out, 96, nearest(x * 10) + downward(y) - absolute(x))
    store(out, 112, from_bits(bits_of(x) & 0x7FFFFF00))
    store(out, 128, -x)
    store(out, 144, repeat(lane(x, 3), 16))
    store(out, 160, floats(integers(x * 100)) + floats(count_up(16)))
    store(out, 176, choose((x > 0) & (y > 0), 1 - x, 1 / y))


def test_real_numbers():
    out = np.zeros(192, np.float32)
    real(A, B, out)
    x, y, half = A, B, np.float32(0.25)
    masked = (x.view(np.int32) & 0x7FFFFF00).view(np.float32)
    fused = (x.astype(np.float64) * y + x).astype(np.float32)
    expected = [
        *(x + y, x - y * np.float32(3), x / y, np.where(x < y, x, np.float32(0))),
        np.minimum(x, y) * np.maximum(x, half),
        fused,
        np.rint(x * np.float32(10)) + np.floor(y) - abs(x),
        *(masked, -x, np.full(16, x[3])),
        np.trunc(x * np.float32(100)) + np.arange(16, dtype=np.float32),
        np.where((x > 0) & (y > 0), 1 - x, 1 / y),
    ]
    assert np.array_equal(out, np.concatenate(expected))


@kernel
def whole(raw, bytes_out, words_out):
    x, y = load(raw, 0, 16), load(raw, 16, 16)
    store(bytes_out, 0, x >> 3 | y << 5)
    store(bytes_out, 16, (x ^ y) + 7 * x)
    store(bytes_out, 32, bytes_of(integers(paired(load(raw, 0, 32))) >> 4))
    store(bytes_out, 48, some_lanes(join(x, y), 12, 16))
    store(words_out, 0, integers(x) * integers(signed(y)))
    store(words_out, 16, integers(look_up(x & 15, TABLE)))
    store(words_out, 32, integers(signed(x) >> 2) - choose(x != y, 1, 0))
    store(words_out, 48, integers(load_halves(raw, 3, 16)) + integers(halves_of(integers(y) << 9)))
    store(words_out, 64, choose(x >= y, 1, integers(x)))


def test_whole_numbers():
    found, words = np.zeros(64, np.uint8), np.zeros(80, np.int32)
    whole(BYTES, found, words)
    x, y = BYTES[:16], BYTES[16:32]
    pairs = (BYTES[:32].view("<u2") >> 4).astype(np.uint8)
    expected = [x >> 3 | y << 5, (x ^ y) + 7 * x, pairs, BYTES[12:28]]
    assert np.array_equal(found, np.concatenate(expected))
    wide, other = x.astype(np.int32), y.view(np.int8).astype(np.int32)
    halves = BYTES[3:35].view("<u2").astype(np.int32)
    shifted = (y.astype(np.int32) << 9).astype(np.uint16).astype(np.int32)
    expected = [
        wide * other,
        np.array(TABLE)[x & 15],
        (x.view(np.int8) >> 2).astype(np.int32) - (x != y),
        halves + shifted,
        np.where(x >= y, 1, wide),
    ]
    assert np.array_equal(words, np.concatenate(expected))


@kernel
def numbers(raw, out):
    for index in range(20):
        out[index] = widen_half(word16(raw, 2 * index)) + np.float32(word32(raw, index) >> 31)


def test_numbers_in_bytes():
    out = np.zeros(20, np.float32)
    numbers(BYTES, out)
    halves = BYTES[:40].view("<f2").astype(np.float32)
    words = [int.from_bytes(BYTES[i : i + 4].tobytes(), "little") >> 31 for i in range(20)]
    assert np.array_equal(out, halves + np.array(words, np.float32), equal_nan=True)


@formula
def collatz(values, steps, out):
    """The steps that each number takes to 1, and the sum of all."""

    def count(index, total):
        def step(_, number, taken):
            odd = number & 1
            following = branch(
                odd == 1,
                lambda: choose(number == 1, 1, number * 3 + 1),
                lambda: number >> 1,
            )
            return following, taken + choose(number == 1, 0, 1)

        number = load(values, index)
        _, taken = loop(0, steps, 1, step, number, number * 0)
        store(out, index, taken)
        return total + taken

    (total,) = loop(0, 16, 1, count, load(values, 0) * 0)
    return total


@kernel
def counted(values, out):
    return collatz(values, 300, out)


def test_loops_and_branches():
    values, out = np.arange(1, 17, dtype=np.int32), np.zeros(16, np.int32)
    total = counted(values, out)
    expected = [0, 1, 7, 2, 5, 8, 16, 3, 19, 6, 14, 9, 9, 17, 17, 4]
    assert out.tolist() == expected
    assert total == sum(expected)


@formula
def columns_of_rows(values, count, out):
    """The columns of some rows of 16."""
    rows = [load(values, 16 * row, 16) for row in range(count)]
    for place, vector in enumerate(transposed(rows)):
        store(out, 16 * place, vector)


@kernel
def crossed(values, out, some):
    transpose(values, 3, 21, out, 1, 20)
    columns_of_rows(values, 4, some)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_transposition(dtype):
    values = RNG.integers(0, 200, 400).astype(dtype)
    out, some = np.zeros(320, dtype), np.zeros(64, dtype)
    crossed(values, out, some)
    rows = np.stack([values[3 + 21 * row :][:16] for row in range(16)])
    assert np.array_equal(np.stack([out[1 + 20 * row :][:16] for row in range(16)]), rows.T)
    assert np.array_equal(some.reshape(16, 4), values[:64].reshape(4, 16).T)


@kernel
def summed(values, out):
    total = doubles(repeat(0.0, 16))
    for start in range(0, values.size, 16):
        total = total + doubles(load(values, start, 16))
    store(out, 0, total)
    return every(total > 0.0)


def test_float64_and_every():
    values = np.full(32, 2.0**-30, np.float32)
    values[:16] = 1
    out = np.zeros(16)
    assert summed(values, out)
    assert (out == 1 + 2.0**-30).all()
    values[[3, 19]] = -1
    assert not summed(values, out)


@formula
def branches_on_a_value(x):
    """What no formula can do."""
    return x if x > 0 else -x


def test_formulas_cannot_branch_as_python_does():
    @kernel
    def wrong(values):
        return branches_on_a_value(values[0])

    with pytest.raises(
        TypeError, match="can't branch on what it computes; it has `choose` and `branch`"
    ):
        wrong(A)
