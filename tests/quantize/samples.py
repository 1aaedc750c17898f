"""Matrices that the tests quantize."""

from __future__ import annotations

import numpy as np


def matrix(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    """Like weights: heavy tails, outliers, constant and zero stretches, one-sided groups."""
    rng = np.random.default_rng([seed, rows, columns])
    values = rng.standard_t(5, (rows, columns)) * scale
    values *= rng.uniform(0.2, 3, (rows, 1))
    if rows > 3:
        values[0, : columns // 2] = 0
        values[1, : columns // 2] = scale
        values[2] = abs(values[2])
        values[3] = -abs(values[3])
    values[-1, -1] = 50 * scale
    return values.astype(np.float32)


def importance(columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, columns])
    return np.exp(rng.normal(0, 2, columns)).astype(np.float32)


def weighted_error(values: np.ndarray, back: np.ndarray, weights: np.ndarray | None) -> float:
    squares = (values.astype(np.float64) - back) ** 2
    return float((squares if weights is None else squares * weights).sum())
