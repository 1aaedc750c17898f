"""Without an importance matrix, the search never loses to rounding to nearest on weights of models.

Each is judged by what it claims to make small: the squared error in groups of 32, and the error
weighted with the squares of the values in longer groups. Group by group, against compressed-tensors'
own rounding.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import gguf2st
from gguf2st.gguf.blocks import decode_rows
from gguf2st.quantize import IntegerGrid, dequantize_rows, quantize_rows
from tests.conversions import FIXTURES
from tests.oracles import real_models
from tests.quantize.oracle import round_to_nearest

# Some blocks of each: the first is unlike the others, and all are too many.
MODELS: dict[str, tuple[Callable[[], Path], tuple[int, ...]]] = {
    "llama": (lambda: FIXTURES / "llama/llama-Q4_K_M.gguf", (0, 1)),
    "qwen35": (lambda: FIXTURES / "qwen35/qwen35-IQ4_XS.gguf", (0, 1)),
    "qwen3moe": (lambda: FIXTURES / "qwen3moe/qwen3moe-Q4_K_M.gguf", (0,)),
    "smollm2": (real_models.smollm2, (0, 14, 29)),
    "gemma3_270m": (real_models.gemma3_270m, (0, 17)),
}
MOST_ROWS = 96  # of a matrix


@cache
def matrices(name: str) -> list[tuple[str, np.ndarray]]:
    obtain, blocks = MODELS[name]
    found = []
    for tensor in gguf2st.open_model(obtain()).tensors.values():
        in_block = any(tensor.name.startswith(f"blk.{block}.") for block in blocks)
        if in_block and len(tensor.shape) > 1 and tensor.columns % 32 == 0:
            raw = tensor.read_rows(0, min(MOST_ROWS, tensor.row_count))
            found.append((tensor.name, decode_rows(tensor.kind, raw, tensor.columns)))
    return found


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("name", MODELS)
def test_search_never_loses_to_rounding(name: str, group: int, symmetric: bool, dtype: str) -> None:
    gained = compared = 0
    for tensor, values in matrices(name):
        # As the formats do where 128 doesn't divide the columns.
        size = next(size for size in (group, 64, 32) if values.shape[1] % size == 0)
        grid = IntegerGrid(4, size, symmetric, dtype)
        by_square = size > 32
        found = dequantize_rows(quantize_rows(values, grid, by_square=by_square), grid)
        *_, nearest = round_to_nearest(values, 4, size, symmetric, dtype)
        weights = np.square(values, dtype=np.float64) if by_square else np.ones(values.shape)
        errors = [
            (weights * np.square(result - values, dtype=np.float64)).reshape(-1, size).sum(1)
            for result in (found, nearest)
        ]
        assert (errors[0] <= errors[1]).all(), tensor
        gained += int((errors[0] < errors[1]).sum())
        compared += len(errors[0])
    assert gained > compared / 2
