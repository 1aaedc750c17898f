"""Encoders fed with tensors write the bytes that they write for arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gguf2st.arrays import to_host
from gguf2st.errors import UnsupportedError
from gguf2st.targets import EncodeContext, TargetOptions, TensorSpec, encode_dense, target_named
from tests.targets.helpers import DTYPES, chunkings, importance, matrix, module, same_bytes, written

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
EXPERT = "model.layers.0.mlp.experts.3.down_proj"
FORMATS = [
    ("awq", TargetOptions()),
    ("awq", TargetOptions(group_size=32, symmetric=True)),
    ("gptq", TargetOptions()),
    ("gptq", TargetOptions(bits=8, group_size=0)),
    ("ct", TargetOptions()),
    ("ct", TargetOptions(group_size=32, symmetric=False, dtype="f16")),
    ("ct", TargetOptions(bits=8, group_size=0)),
    ("fp8", TargetOptions()),
    ("fp8", TargetOptions(variant="block")),
    ("w8a8", TargetOptions(dtype="f16")),
    ("mxfp4", TargetOptions()),
    ("nvfp4", TargetOptions()),
    ("w4afp8", TargetOptions()),
    ("lossless", TargetOptions()),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options"), FORMATS, ids=str)
def test_the_same_bytes(name, options, device):
    target, shape = target_named(name, options), (256, 384)
    values = matrix(*shape)
    if name == "lossless":
        values = (np.round(values / values.max() * 7) / 64).astype(np.float32)
    for scheme in target.schemes():
        if target.refusal(shape, scheme) is not None:
            continue
        item = module(*shape, scheme, EXPERT)
        for weights in (None, importance(shape[1])):
            context = EncodeContext(weights, float(np.abs(values).max()), "rtn", 0.5)
            expected = written(target, item, values, context)
            tensor = torch.from_numpy(values).to(device)
            for rows in chunkings(shape[0], target.encoder(item, context).row_multiple):
                assert same_bytes(written(target, item, tensor, context, rows), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_unquantized(dtype, device):
    rng = np.random.default_rng(1)
    values = np.concatenate(
        [
            np.exp2(rng.uniform(-150, 15.9, 50000)) * rng.choice([-1, 1], 50000),
            np.arange(0, 2**16).astype(np.uint16).view(np.float16),  # all halves, and
            (np.arange(0x1000, 0x3000, 0.5)) * 2.0**-38,  # what lies between the smallest
            [0.0, -0.0, 2.0**-149, 65504, 65519.99],
        ]
    ).astype(np.float32)
    values = values[np.isfinite(values)][None]
    spec = TensorSpec("x", dtype, values.shape)
    expected = encode_dense(spec, values)
    found = to_host(encode_dense(spec, torch.from_numpy(values).to(device)))
    assert found.dtype == expected.dtype == np.dtype(DTYPES[dtype][0])
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_or_too_large(device):
    values = torch.tensor([[np.nan, np.inf, -np.inf, 1.0, 3.4e38]], device=device)
    for dtype in ("BF16", "F32"):
        host = to_host(encode_dense(TensorSpec("x", dtype, (1, 5)), values))
        bits = host.astype(np.uint32) << 16 if dtype == "BF16" else host.view(np.uint32)
        back = bits.view(np.float32)[0]
        assert np.isnan(back[0])
        assert back[1:4].tolist() == [np.inf, -np.inf, 1]
    encode_dense(TensorSpec("x", "F16", (1, 4)), values[:, :4])
    with pytest.raises(UnsupportedError, match=r"tensor x has a value of .*, beyond float16's"):
        encode_dense(TensorSpec("x", "F16", (1, 5)), values)
