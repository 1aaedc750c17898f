"""Without an importance matrix, the search never loses to rounding to nearest on weights of models.

Each is judged by what it claims to make small: the squared error in groups of 32, and the error
weighted with the squares of the values in longer groups. Group by group, against compressed-tensors'
own rounding.
"""

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import gguf2st
from gguf2st.gguf.blocks import decode_rows
from gguf2st.quantize import IntegerGrid, dequantize_rows, quantize_rows
from tests.conversions import FIXTURES, cases, one_per_folder
from tests.oracles import real_models
from tests.quantize.oracle import round_to_nearest

# Some blocks of each: the first is unlike the others, and all are too many.
MODELS: dict[str, tuple[Callable[[], list[Path]], tuple[int, ...]]] = {
    "llama": (lambda: [FIXTURES / "llama/llama-Q4_K_M.gguf"], (0, 1)),
    "qwen35": (lambda: [FIXTURES / "qwen35/qwen35-IQ4_XS.gguf"], (0, 1)),
    "qwen3moe": (lambda: [FIXTURES / "qwen3moe/qwen3moe-Q4_K_M.gguf"], (0,)),
    "fixtures": (lambda: [case.model for case in one_per_folder(cases())], (0,)),
    "smollm2": (lambda: [real_models.smollm2()], (0, 14, 29)),
    "gemma3_270m": (lambda: [real_models.gemma3_270m()], (0, 17)),
}
MOST_ROWS = 96  # of a matrix, or of one in each file
GRIDS = [
    IntegerGrid(4, group, symmetric, dtype)
    for group in (128, 32)
    for symmetric in (True, False)
    for dtype in ("F16", "BF16")
]
GRIDS.append(IntegerGrid(8, 32, True, "BF16"))


@cache
def matrices(name: str) -> list[tuple[str, np.ndarray]]:
    obtain, blocks = MODELS[name]
    files, found = obtain(), []
    for file in files:
        for tensor in gguf2st.open_model(file).tensors.values():
            in_block = any(tensor.name.startswith(f"blk.{block}.") for block in blocks)
            if in_block and len(tensor.shape) > 1 and tensor.columns % 32 == 0:
                raw = tensor.read_rows(0, min(MOST_ROWS // len(files), tensor.row_count))
                values = decode_rows(tensor.kind, raw, tensor.columns)
                found.append((f"{file.name} {tensor.name}", values))
    return found


@pytest.mark.parametrize("options", GRIDS, ids=lambda g: "-".join(map(str, astuple(g))))
@pytest.mark.parametrize("name", MODELS)
def test_search_never_loses_to_rounding(name: str, options: IntegerGrid) -> None:
    gained = compared = 0
    for tensor, values in matrices(name):
        # As the formats do where 128 doesn't divide the columns.
        size = next(g for g in (options.group_size, 64, 32) if values.shape[1] % g == 0)
        grid, by_square = replace(options, group_size=size), size > 32
        found = dequantize_rows(quantize_rows(values, grid, by_square=by_square), grid)
        *_, nearest = round_to_nearest(values, grid.bits, size, grid.symmetric, grid.scale_dtype)
        weights = np.square(values, dtype=np.float64) if by_square else np.ones(values.shape)
        errors = [
            (weights * np.square(result - values, dtype=np.float64)).reshape(-1, size).sum(1)
            for result in (found, nearest)
        ]
        assert (errors[0] <= errors[1]).all(), tensor
        gained += int((errors[0] < errors[1]).sum())
        compared += len(errors[0])
    assert gained > compared / 2
