"""The loop that compares rows, against the same arithmetic of numpy in float64."""

import numpy as np
import pytest

from gguf2st.verification import kernels
from gguf2st.verification.grids import (
    E2M1_SPACING,
    Change,
    Grid,
    Spacing,
    floating,
    integers,
    runs_of,
)

LIMITS = np.array((0.505, 4e-7, 1e-6), np.float32)
KINDS: dict[str, tuple[Spacing, list[float]]] = {
    "int": (integers(0, 15), list(range(16))),
    "e2m1": (E2M1_SPACING, [0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "fp8": (floating("F8_E4M3"), [0, 2**-9, 0.3, 1, 17, 447, 448]),
}


def distance(kind: str, level: np.ndarray) -> np.ndarray:
    """From a number to the next, as the formats define it."""
    if kind == "int":
        return np.ones_like(level)
    if kind == "e2m1":
        return np.select([abs(level) < 2, abs(level) < 4], [0.5, 1], 2)
    return np.maximum(abs(level) / 8, 2.0**-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 7, 16, 130, 1100])
@pytest.mark.parametrize("scaled", [False, True])
def test_sums(kind: str, width: int, scaled: bool) -> None:
    random = np.random.default_rng(width)
    spacing, choices = KINDS[kind]
    rows, groups = 6, random.integers(0, 3, width)
    numbers = random.choice(np.array(choices, np.float32), (rows, width))
    zero = 7 if kind == "int" else 0
    zeros = np.full((1, 1), zero, np.float32)
    factors = random.uniform(0.5, 2, (rows, 3)).astype(np.float32)
    grid = Grid(numbers, factors, zeros, runs_of(groups), spacing)
    columns = random.uniform(0.5, 2, width).astype(np.float32)
    off = random.uniform(0, 0.1, width).astype(np.float32)
    # Room of other sizes is common, and may hold anything.
    room = np.full((6, width + 40), np.nan, np.float32)
    homes = random.permutation(rows)
    sums, marks = np.zeros((5, rows)), np.ones((2, width))

    value = ((numbers - zero) * factors[:, groups]).astype(float)
    step = distance(kind, (numbers - zero).astype(float)) * factors[:, groups]
    slack = np.zeros((rows, width))
    if scaled:
        value, step = value * columns, step * columns
        slack = abs(value) * off
    reference = (value + step * random.uniform(-0.6, 0.6, (rows, width))).astype(np.float32)
    scales = (columns, off, np.ones(rows, np.float32)) if scaled else (np.empty(0, np.float32),) * 3
    found = kernels.add_rows(
        grid, int(Change.NONE), *scales, True, reference, homes, LIMITS, room, sums, marks
    )

    there = reference.astype(float)
    pairs = ((value - there,) * 2, (there, there), (value, value), (there, value), (step, step))
    for total, (one, other) in zip(sums, pairs, strict=True):
        np.testing.assert_allclose(total[homes], (one * other).sum(1), rtol=2e-5)
    np.testing.assert_allclose(
        marks, 1 + np.stack((there.sum(0), value.sum(0))), rtol=1e-4, atol=1e-3
    )
    inside = (numbers > {"int": 0, "e2m1": -6, "fp8": -448}[kind]) & (numbers < max(choices))
    mean = np.sqrt(np.square(there).mean(1, keepdims=True))
    allowed = 0.505 * step + slack + 4e-7 * (abs(value) + abs(there)) + 1e-6 * mean
    expected = int(((abs(value - there) > allowed) & inside).sum())
    assert found == expected
    assert expected or width < 16 or scaled  # or nothing would have been tested
