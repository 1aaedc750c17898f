"""The decoders against both references: gguf-py's numpy code and ggml's C code."""

from functools import cache

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf2st.gguf.blocks import BlockType, decode_rounded, decode_rows
from gguf2st.gguf.blocks.kernels import kernel_of
from tests.blocks.samples import (
    KINDS,
    assert_same_bits,
    crafted_bytes,
    random_bytes,
    sound_bytes,
)
from tests.oracles import ggml

# What the references lack is listed, so that a type can't go untested unnoticed.
NOT_IN_GGUF_PY = {"I8", "I16", "I32", "I64", "F64", "Q1_0", "Q2_0"}
NOT_IN_GGML = {"F32", "F64", "I8", "I16", "I32", "I64"}
BY_GGUF_PY = sorted(set(KINDS) - NOT_IN_GGUF_PY)
BY_GGML = sorted(set(KINDS) - NOT_IN_GGML)

# ggml prepares for half a minute before it quantizes to the smallest types.
SLOW_TO_QUANTIZE = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"}
QUANTIZED = sorted(set(BY_GGML) - SLOW_TO_QUANTIZE - {"F16", "BF16"})

needs_ggml = pytest.mark.skipif(not ggml.available(), reason="xllamacpp isn't installed")


def decode(kind: BlockType, raw: np.ndarray) -> np.ndarray:
    return kind.decode(raw.view(kind.layout)[:, 0])


def compiled(kind: BlockType, raw: np.ndarray) -> np.ndarray:
    return decode_rows(kind, raw, kind.block_size)


def by_gguf_py(kind: BlockType, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])


def by_ggml(kind: BlockType, raw: np.ndarray) -> np.ndarray:
    return ggml.dequantize(kind.name, raw.tobytes(), len(raw) * kind.block_size)


@cache
def blocks_of(name: str) -> np.ndarray:
    kind = KINDS[name]
    return np.concatenate(
        [crafted_bytes(kind), random_bytes(kind, 400, seed=2), sound_bytes(kind, 400, seed=3)]
    )


WAYS = {"numpy": decode, "kernel": compiled}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_GGUF_PY)
def test_same_bits_as_gguf_py(name, way):
    raw = blocks_of(name)
    assert_same_bits(WAYS[way](KINDS[name], raw), by_gguf_py(KINDS[name], raw))


@needs_ggml
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_GGML)
def test_same_bits_as_ggml(name, way):
    raw = blocks_of(name)
    assert_same_bits(WAYS[way](KINDS[name], raw), by_ggml(KINDS[name], raw))


@pytest.mark.parametrize("name", sorted(KINDS))
def test_which_types_have_a_kernel(name):
    # Numpy copies the others as they are.
    plain = {"F32", "F64", "I8", "I16", "I32", "I64"}
    assert (kernel_of(KINDS[name]) is None) == (name in plain)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("name", BY_GGUF_PY)
def test_rounded_to_16_bits_as_torch_does(name, dtype):
    raw = blocks_of(name)
    out = np.empty((len(raw), KINDS[name].block_size), "u2" if dtype == "BF16" else "f2")
    odd = decode_rounded(KINDS[name], raw, out.shape[1], dtype, out)
    target = torch.bfloat16 if dtype == "BF16" else torch.float16
    expected = torch.from_numpy(by_gguf_py(KINDS[name], raw)).to(target)
    found = torch.from_numpy(out.view(np.int16)).view(target)
    same = found.view(torch.int16) == expected.view(torch.int16)
    assert (same | (found.isnan() & expected.isnan())).all()
    assert odd == int((~expected.isfinite()).sum())


@pytest.mark.parametrize("name", sorted(KINDS))
def test_random_bytes(name):
    kind = KINDS[name]
    size = kind.block_bytes

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=size, max_size=size))
    def check(block):
        raw = np.frombuffer(block, np.uint8).reshape(1, size)
        for way in WAYS.values():
            values = way(kind, raw)
            if name not in NOT_IN_GGUF_PY:
                assert_same_bits(values, by_gguf_py(kind, raw))
            if name not in NOT_IN_GGML and ggml.available():
                assert_same_bits(values, by_ggml(kind, raw))

    check()


@needs_ggml
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_ggml_quantized_comes_back(name):
    kind = KINDS[name]
    original = np.random.default_rng(5).standard_normal((8, 512)).astype(np.float32)
    raw = np.frombuffer(ggml.quantize(name, original), np.uint8).reshape(-1, kind.block_bytes)
    values = decode(kind, raw)
    assert_same_bits(values, by_ggml(kind, raw))
    # A loose bound that only a wrong order of the elements can break.
    bits = 8 * kind.block_bytes / kind.block_size
    error = np.square(values.reshape(original.shape) - original).mean()
    assert error < 3 * 0.25**bits + 0.01 if bits > 4 else error < 0.75


@needs_ggml
def test_the_references_hold_what_is_said_of_them():
    assert set(ggml.codes()) == set(BY_GGML)
    for name, code in ggml.codes().items():
        kind = KINDS[name]
        sizes = ggml.block_size(name), ggml.block_bytes(name)
        assert (kind.code, kind.block_size, kind.block_bytes) == (code, *sizes)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_no_blocks(name):
    kind = KINDS[name]
    assert kind.decode(np.empty(0, kind.layout)).shape == (0, kind.block_size)
