"""Numpy arrays and torch tensors side by side: what code that takes either needs to know.

Torch is never imported before a tensor or a device is there, which would cost a second.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from gguf2st.rounding import rounded

# A numpy array or a torch tensor. Torch's types can't be named where it isn't imported.
Array = Any

_COPIES: dict[tuple[int, str], tuple[npt.NDArray[Any], Any]] = {}
# What torch has for numpy's unsigned integers of more than 8 bits: the same bits, signed.
_SIGNED = {np.dtype("u2"): "i2", np.dtype("u4"): "i4", np.dtype("u8"): "i8"}


def is_tensor(array: object) -> TypeGuard[Any]:
    """Whether it is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def as_tensor(array: npt.NDArray[Any]) -> Any:
    """A numpy array as a tensor on the CPU that shares its memory; uint16 becomes int16 and so on."""
    import torch  # noqa: PLC0415

    return torch.from_numpy(np.ascontiguousarray(array).view(_SIGNED.get(array.dtype, array.dtype)))


def signed(array: Array) -> Array:
    """See integers or truth values (..., n) as int8 (..., n * their size), without a copy."""
    if is_tensor(array):
        import torch  # noqa: PLC0415

        return array.view(torch.int8)
    return array.view(np.int8)


def rounded_to(values: Array, dtype: str) -> Array:
    """Float32 values rounded to nearest, ties to even.

    Args:
        values: any shape. What is beyond the dtype becomes infinite, and a NaN stays one.
        dtype: safetensors' "F32", "F16" or "BF16".

    Returns:
        Little-endian, in the shape of `values`; of BF16, numpy holds the bits as uint16.
    """
    if is_tensor(values):
        import torch  # noqa: PLC0415

        return values.to(
            {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
        )
    return values.astype("<f4", copy=False) if dtype == "F32" else rounded(values, dtype)


def empty_beside(values: Any, shape: tuple[int, ...], dtype: str) -> Array:
    """An array to be filled, of safetensors' `dtype` "I32" or "F16", where `values` lie."""
    if is_tensor(values):
        import torch  # noqa: PLC0415

        kind = {"I32": torch.int32, "F16": torch.float16}[dtype]
        return torch.empty(shape, dtype=kind, device=values.device)
    return np.empty(shape, {"I32": "<i4", "F16": "<f2"}[dtype])


def on_device_of(tensor: Array, table: npt.NDArray[Any]) -> Any:
    """A table as a tensor on the device of another one; copied once for each device.

    The table must last as long as the process and never change.
    """
    key = id(table), str(tensor.device)
    if key not in _COPIES:
        copy = as_tensor(table).to(tensor.device)
        if copy.is_cuda:
            import torch  # noqa: PLC0415

            # Other streams than this thread's will read it.
            torch.cuda.current_stream(copy.device).synchronize()
        _COPIES[key] = table, copy
    return _COPIES[key][1]


def beside(values: Array, array: npt.NDArray[Any]) -> Array:
    """An array to be combined with `values`: itself, or a copy on their device."""
    return as_tensor(array).to(values.device) if is_tensor(values) else array


def to_host(array: Array) -> npt.NDArray[Any]:
    """The numpy array of the same bytes: bfloat16 becomes uint16, float8 uint8."""
    if not is_tensor(array):
        return np.asarray(array)
    import torch  # noqa: PLC0415

    if array.dtype == torch.bfloat16:
        return to_host(array.view(torch.int16)).view(np.uint16)
    if array.dtype == torch.float8_e4m3fn:
        array = array.view(torch.uint8)
    found: npt.NDArray[Any] = array.cpu().numpy()
    return found
