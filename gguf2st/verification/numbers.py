"""Elements of safetensors files as numpy arrays, and back: only what numpy has no dtype for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf2st.errors import InputError, UnsupportedError
from gguf2st.verification.header import Tensor

# safetensors' dtypes as numpy has them, or of the same size.
STORAGE = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}
# OCP "Microscaling Formats": sign, two bits of exponent, one of mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate((E2M1, -E2M1))


def opened(directory: Path, tensor: Tensor) -> npt.NDArray[np.generic]:
    """A tensor's elements, mapped into memory and read when they are used.

    Raises `InputError` for a file that can't be read or ends early, `UnsupportedError` for a dtype.
    """
    dtype = STORAGE.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedError(f"tensor {tensor.name} is {tensor.dtype}, which can't be decoded.")
    if not tensor.nbytes:
        return np.empty(tensor.shape, dtype)
    path = directory / tensor.file
    try:
        return np.memmap(path, dtype, "r", tensor.offset, tensor.shape or (1,))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read at tensor {tensor.name} ({error}).") from error


def floats(elements: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    """Elements of a safetensors dtype as float32."""
    found = np.asarray(elements)
    if dtype == "BF16":
        return (found.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F8_E8M0", "U8"):
        return exponents(found.astype(np.uint8))
    if dtype in EIGHT_BITS:
        small: npt.NDArray[np.float32] = EIGHT_BITS[dtype][found.astype(np.intp)]
        return small
    return found.astype(np.float32)


def exponents(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Powers of two that E8M0 codes stand for."""
    found: npt.NDArray[np.float32] = np.ldexp(np.float32(1), codes.astype(np.int32) - 127)
    return found


def rounded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    """Float32 values in another floating-point dtype, the nearest and of two the even one."""
    if dtype == "F32":
        return values.astype("<f4", copy=False)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype("<f2")
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    # The carry would make an infinity of a NaN.
    kept = np.where(np.isnan(values), bits | np.uint32(1 << 22), nearest)
    return (kept >> 16).astype("<u2")


def _eight_bits(exponent_bits: int, bias: int) -> npt.NDArray[np.float32]:
    """All finite values of an FP8 type by its codes (OCP "8-bit floating point specification")."""
    codes = np.arange(256, dtype=np.int32)
    fraction_bits = 7 - exponent_bits
    exponent = (codes & 127) >> fraction_bits
    fraction = codes & ((1 << fraction_bits) - 1)
    leading = np.where(exponent > 0, 1 << fraction_bits, 0)
    power = np.maximum(exponent, 1) - bias - fraction_bits
    values = np.ldexp((leading + fraction).astype(np.float32), power)
    signed: npt.NDArray[np.float32] = np.where(codes < 128, values, -values).astype(np.float32)
    return signed


_E4M3, _E5M2 = _eight_bits(4, 7), _eight_bits(5, 15)
_E4M3[[127, 255]] = np.nan
_E5M2[[124, 252]] = [np.inf, -np.inf]
_E5M2[[125, 126, 127, 253, 254, 255]] = np.nan
# What the codes of a type stand for.
EIGHT_BITS = {"F8_E4M3": _E4M3, "F8_E5M2": _E5M2}
