"""Importance matrices, against gguf-py and against files made here."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf2st.errors import InputError
from gguf2st.quantize import read_importance

RNG = np.random.default_rng(0)
REAL = Path(__file__).parents[2] / "fixtures/importance/smollm2-135m.imatrix.gguf"


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def legacy(entries: dict[str, tuple[int, np.ndarray]], tail: bytes = b"") -> bytes:
    raw = struct.pack("<i", len(entries))
    for name, (calls, sums) in entries.items():
        raw += struct.pack("<i", len(name)) + name.encode()
        raw += struct.pack("<ii", calls, len(sums)) + sums.astype("<f4").tobytes()
    return raw + tail


def sums(*shape: int) -> np.ndarray:
    return RNG.uniform(0, 1000, shape).astype(np.float32)


def test_means_of_a_file_in_gguf(tmp_path):
    dense, experts = sums(1, 64), sums(3, 32)
    path = write_gguf(
        tmp_path / "imatrix.gguf",
        {
            "blk.0.attn_q.weight.in_sum2": dense,
            "blk.0.attn_q.weight.counts": np.array([[4096]], np.float32),
            "blk.0.ffn_up_exps.weight.in_sum2": experts,
            "blk.0.ffn_up_exps.weight.counts": np.array([[10], [0], [7]], np.float32),
            "blk.1.attn_q.weight.in_sum2": dense,
            "blk.1.attn_q.weight.counts": np.array([[0]], np.float32),
        },
    )
    found = read_importance(path)
    assert list(found) == ["blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"]
    assert found["blk.0.attn_q.weight"].dtype == np.float32
    assert np.array_equal(found["blk.0.attn_q.weight"], dense[0] / 4096)
    expected = np.stack([experts[0] / 10, np.ones(32, np.float32), experts[2] / 7])
    assert np.allclose(found["blk.0.ffn_up_exps.weight"], expected, rtol=1e-7, atol=0)


def test_means_of_an_old_file(tmp_path):
    path = tmp_path / "imatrix.dat"
    first, second = sums(64), sums(96)
    entries = {"blk.0.attn_q.weight": (8, first), "output.weight": (0, second)}
    for tail in (b"", struct.pack("<ii", 8, 7) + b"cal.txt"):
        path.write_bytes(legacy(entries, tail))
        found = read_importance(path)
        assert list(found) == list(entries)
        assert np.array_equal(found["blk.0.attn_q.weight"], first / 8)
        assert np.array_equal(found["output.weight"], second)


def test_a_real_file_as_gguf_py_reads_it():
    found = read_importance(REAL)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(REAL).tensors}
    assert len(found) * 2 == len(tensors)
    for name, values in found.items():
        count = tensors[name + ".counts"].reshape(-1)
        assert np.array_equal(values, tensors[name + ".in_sum2"].reshape(-1) / count)


def damaged(name: str, tmp_path: Path) -> Path:
    path, one = tmp_path / "x", np.array([[4]], np.float32)
    good = legacy({"a.weight": (8, sums(8))})
    files = {
        "text": b"hello, world, this is text",
        "empty": b"",
        "short": good[:3],
        "cut": good[:-1],
        "cut in the name": legacy({"blk.0.attn_q.weight": (8, sums(8))})[:20],
        "cut after the name": good[:17],
        "many entries": struct.pack("<i", 5000) + good[4:],
        "long name": good[:4] + struct.pack("<i", 1 << 30) + good[8:],
        "negative name": good[:4] + struct.pack("<i", -5) + good[8:],
        "many numbers": good[:20] + struct.pack("<i", 1 << 29) + good[24:],
        "negative calls": good[:16] + struct.pack("<i", -1) + good[20:],
        "twice": struct.pack("<i", 2) + good[4:] + good[4:],
        "nan": legacy({"a.weight": (8, np.full(8, np.nan))}),
        "negative": legacy({"a.weight": (8, np.full(8, -1.0))}),
    }
    if name in files:
        path.write_bytes(files[name])
        return path
    tensors = {
        "a model": {"blk.0.attn_q.weight": sums(8, 8)},
        "no counts": {"a.weight.in_sum2": sums(1, 8)},
        "other type": {"a.weight.in_sum2": sums(1, 8).astype(np.float16), "a.weight.counts": one},
        "counts that don't divide": {
            "a.weight.in_sum2": sums(2, 8),
            "a.weight.counts": np.ones((3, 1), np.float32),
        },
        "infinite": {
            "a.weight.in_sum2": np.full((1, 8), np.inf, np.float32),
            "a.weight.counts": one,
        },
        "hardly counted": {
            "a.weight.in_sum2": np.full((1, 8), 1e30, np.float32),
            "a.weight.counts": np.float32(1e-30) * one,
        },
        "never ran": {"a.weight.in_sum2": sums(1, 8), "a.weight.counts": 0 * one},
    }
    return write_gguf(path, tensors[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "is no importance matrix; give a file that llama-imatrix made"),
        ("empty", "is no importance matrix"),
        ("short", "it ends after 3 bytes"),
        ("cut", "'a.weight' claims 8 numbers"),
        ("cut in the name", "entry 0 has a name of 19 bytes"),
        ("cut after the name", "it ends after 17 bytes, inside an entry"),
        ("many entries", "it claims 5,000 entries"),
        ("long name", "entry 0 has a name of 1,073,741,824 bytes"),
        ("negative name", "entry 0 has a name of -5 bytes"),
        ("many numbers", "claims 536,870,912 numbers"),
        ("negative calls", "is there twice or has -1 calls"),
        ("twice", "is there twice"),
        ("nan", "a.weight holds a number that is negative or not finite"),
        ("negative", "negative or not finite"),
        ("a model", r"is a GGUF file but no importance matrix \(no tensor is named \*.in_sum2\)"),
        ("no counts", "a.weight has sums but no counts"),
        ("other type", "a.weight.in_sum2 has type F16, not F32"),
        ("counts that don't divide", r"sums of shape \(2, 8\) and 3 counts"),
        ("infinite", "negative or not finite"),
        ("hardly counted", "a.weight holds a number that is negative or not finite"),
        ("never ran", "holds no importance of any tensor"),
    ],
)
def test_other_files_are_refused_in_a_sentence(name, message, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        read_importance(damaged(name, tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_missing_file():
    with pytest.raises(InputError, match=r"can't be read \(No such file"):
        read_importance("/nowhere/imatrix.gguf")
