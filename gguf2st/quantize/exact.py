"""Values that lie on an integer grid already, as those of many GGUF types do, keep their codes.

Found from the values alone: whatever made them, decoding what comes out gives them back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf2st.quantize import exact_kernels as kernels
from gguf2st.quantize.errors import ErrorSums
from gguf2st.quantize.integer import IntegerGrid, IntegerRows, dequantize_rows
from gguf2st.quantize.weights import check_values

# Bits of a float32's fraction that a scale of this dtype lacks, and how numpy rounds to it.
_LOST_BITS = {"F16": 13, "F32": 0}


def exact_rows(values: npt.NDArray[np.float32], grid: IntegerGrid) -> IntegerRows | None:
    """Codes and scales that give the values back, or None when a group lies on no grid.

    Where a group's unit has more bits than the scale's dtype (IQ4_XS and relatives:
    17 bits), the codes are exact and the scale is rounded once, which moves values by 2^-11
    of themselves at most in F16 (more for scales below 2^-14, where it has fewer bits).

    Args:
        values: float32 (rows, columns), finite.
        grid: symmetric, with scales of F16 or F32; its group size must divide the columns.

    Raises:
        ValueError: a value isn't finite, or shapes and grid don't fit.
    """
    if not grid.symmetric or grid.scale_dtype not in _LOST_BITS or not grid.group_size:
        raise ValueError(f"{grid} has no exact fit")
    check_values(values, grid.group_size)
    if not np.isfinite(values).all():
        raise ValueError("a value isn't finite")
    rows, columns = values.shape
    shape = (rows, columns // grid.group_size)
    codes, units = np.empty((rows, columns), np.uint8), np.empty(shape, np.float32)
    found = np.empty(shape, np.uint8)
    half = 1 << (grid.bits - 1)
    kernels.fit_exactly(
        np.ascontiguousarray(values),
        grid.group_size,
        half,
        _LOST_BITS[grid.scale_dtype],
        codes,
        units,
        found,
    )
    if (found == kernels.OFF).any():
        return None
    if grid.scale_dtype == "F16":
        with np.errstate(over="ignore"):
            units = units.astype(np.float16).astype(np.float32)
        if not np.isfinite(units).all() or not units.all():
            return None
    result = IntegerRows(codes, units, np.full(shape, half, np.uint8))
    differences = dequantize_rows(result, grid) - values
    squared = float(np.square(differences, dtype=np.float64).sum())
    norm = float(np.square(values, dtype=np.float64).sum())
    # Zeros lie on every grid.
    changes = np.divide(differences, values, out=np.zeros_like(values), where=values != 0)
    largest = float(np.abs(changes).max(initial=0))
    result.errors = ErrorSums(squared, norm, squared, squared, largest)
    return result
