"""Importances as kernels take them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import Array, to_host
from gguf2st.gguf.blocks import PackedRows


def group_weights(
    importance: npt.NDArray[np.float32] | None, columns: int, group: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Split an importance into weights of at most 1 and the power of two of each group.

    So sums of weighted errors can't overflow. Where all weights of a group are 0, its
    weights become 1 and its power 0: a fit then has something to go by, and no error counts.

    Args:
        importance: float32 (columns,), finite and not negative; None for equal weights.
        columns: of the matrix.
        group: columns of a group, which divides `columns`.

    Returns:
        float32 (columns,) and float64 (groups,), whose product is the importance.

    Raises:
        ValueError: the importance has another shape or an impossible number.
    """
    groups = columns // group
    if importance is None:
        return np.ones(columns, np.float32), np.ones(groups)
    if importance.shape != (columns,):
        raise ValueError(f"importance has shape {importance.shape}, not ({columns},)")
    weights = importance.astype(np.float64).reshape(groups, group)
    largest = weights.max(axis=1)
    if not (np.isfinite(weights).all() and weights.min() >= 0):
        raise ValueError("importance holds a number that is negative or not finite")
    units = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1))))
    weights /= units[:, None]
    weights[largest == 0] = 1
    return weights.astype(np.float32).reshape(columns), np.where(largest > 0, units, 0)


def check_values(values: Array | PackedRows, group: int) -> None:
    """Raise `ValueError` unless values are float32 (rows, columns) and `group` divides columns."""
    dtype = "float32" if isinstance(values, PackedRows) else str(values.dtype)
    if len(values.shape) != 2 or dtype.removeprefix("torch.") != "float32":
        raise ValueError(
            f"values must be float32 (rows, columns), not {dtype} {tuple(values.shape)}"
        )
    columns = values.shape[1]
    if not columns or columns % group:
        raise ValueError(f"groups of {group} columns don't divide rows of {columns}")


def not_finite(values: Array) -> ValueError:
    """What to raise for values that hold a NaN or an infinity."""
    values = to_host(values)
    row, column = np.argwhere(~np.isfinite(values))[0]
    return ValueError(f"row {row}, column {column} holds {values[row, column]}, not a number")
