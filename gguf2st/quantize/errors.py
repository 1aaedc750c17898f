"""Sums from which a module's error is reported."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A search must beat plain rounding by more than float32 sums over 128 columns can be wrong
# (2 * 128 * 2**-24), so that it is never worse, however errors are summed up.
MARGIN = 1 - 2**-15


@dataclass
class ErrorSums:
    """Sums over the weights x of a matrix and what they become, y, in float64.

    `weighted` and `weighted_nearest` are importance-weighted squared errors of the
    chosen fit and of plain round-to-nearest (weights 1 without an importance). `largest` is the
    largest |x - y| / |x| where it was measured: of fits that are exact but for their scales.
    """

    squared: float = 0.0
    norm: float = 0.0
    weighted: float = 0.0
    weighted_nearest: float = 0.0
    largest: float = 0.0

    def add(self, other: ErrorSums) -> None:
        """Add the sums of further rows."""
        self.squared += other.squared
        self.norm += other.norm
        self.weighted += other.weighted
        self.weighted_nearest += other.weighted_nearest
        self.largest = max(self.largest, other.largest)

    @property
    def relative_rmse(self) -> float:
        """sqrt(sum (x - y)^2 / sum x^2); 0 for an all-zero matrix."""
        return math.sqrt(self.squared / self.norm) if self.norm else 0.0


class ScaleRangeError(ValueError):
    """A scale is larger than the dtype in which it has to be stored can hold."""

    def __init__(self, scale: float, dtype: str) -> None:
        super().__init__(f"a scale would be {scale:.6g}, more than {dtype} can hold")
