"""Rounding to 16 bits, against torch."""

import numpy as np
import pytest
import torch

from gguf2st.rounding import count_not_finite, round_values, rounded

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16}


def samples(count, seed=0):
    """float32 of any bits, of any size that halves can hold, and at their borders."""
    random = np.random.default_rng(seed)
    any_bits = random.integers(0, 1 << 32, count, np.uint32).view(np.float32)
    sizes = 10.0 ** random.integers(-12, 6, count)
    borders = [65504, 65519.996, 65520, 65536, -65520, 2**-14, 2**-14 * (1 - 2**-12), 2**-24]
    borders += [2**-25, 2**-25 * 1.0001, 0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 2**-149]
    return np.concatenate(
        [any_bits, random.standard_normal(count) * sizes, np.array(borders)]
    ).astype(np.float32)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("count", [0, 1, 7, 5000])
def test_as_torch_rounds(dtype, count):
    values = samples(count)
    expected = torch.from_numpy(values).to(TORCH[dtype])
    found = torch.from_numpy(rounded(values, dtype).view(np.int16)).view(TORCH[dtype])
    same = found.view(torch.int16) == expected.view(torch.int16)
    assert (same | (found.isnan() & expected.isnan())).all()
    out = np.empty(values.shape, "<u2" if dtype == "BF16" else "<f2")
    assert round_values(values, dtype, out) == int((~expected.isfinite()).sum())


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_counting_what_is_not_finite(size):
    values = np.ones(size, np.float32)
    assert count_not_finite(values) == 0
    values[::3], values[1::5] = np.nan, -np.inf
    assert count_not_finite(values) == int((~np.isfinite(values)).sum())
