"""Reads values of tensors in chunks of some megabytes, and sums up what rules ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf2st.verification.header import Tensor
from gguf2st.verification.numbers import STORAGE, floats

CHUNK_BYTES = 8 << 20
FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def raw_chunks(directory: Path, tensor: Tensor) -> Iterator[npt.NDArray[np.generic]]:
    """Elements as they lie there, one dimension, a chunk at a time; nothing for unknown dtypes.

    Raises `OSError`; a file that ends early yields what there is.
    """
    dtype = STORAGE.get(tensor.dtype)
    if dtype is None or not tensor.nbytes:
        return
    count = CHUNK_BYTES // np.dtype(dtype).itemsize
    left = tensor.nbytes // np.dtype(dtype).itemsize
    with (directory / tensor.file).open("rb") as stream:
        stream.seek(tensor.offset)
        while left > 0:
            chunk = np.fromfile(stream, dtype, min(count, left))
            if not len(chunk):
                return
            yield chunk
            left -= len(chunk)


def float_chunks(directory: Path, tensor: Tensor) -> Iterator[npt.NDArray[np.float32]]:
    """The same as float32, of floating-point tensors."""
    for chunk in raw_chunks(directory, tensor):
        yield floats(chunk, tensor.dtype)


@dataclass
class Summary:
    """Of one floating-point tensor; the figures are of its finite values."""

    count: int = 0
    broken: int = 0
    zeros: int = 0
    negative: int = 0
    least: float = float("inf")
    most: float = float("-inf")
    total: float = 0.0

    @property
    def mean(self) -> float:
        """Mean of the finite values."""
        return self.total / max(1, self.count - self.broken)


def summarize(directory: Path, tensor: Tensor) -> Summary:
    """Read a whole tensor."""
    found = Summary()
    for chunk in float_chunks(directory, tensor):
        finite = np.isfinite(chunk)
        good = chunk if finite.all() else chunk[finite]
        found.count += len(chunk)
        found.broken += len(chunk) - len(good)
        if len(good):
            found.zeros += int(np.count_nonzero(good == 0))
            found.negative += int(np.count_nonzero(good < 0))
            found.least = min(found.least, float(good.min()))
            found.most = max(found.most, float(good.max()))
            found.total += float(good.sum(dtype=np.float64))
    return found


def ends_of_range(directory: Path, tensor: Tensor, bits: int) -> float:
    """Share of packed codes that are the smallest or largest of 2^bits; `bits` divides 8."""
    at_end = total = 0
    for chunk in raw_chunks(directory, tensor):
        codes = chunk.view(np.uint8)
        per, top = 8 // bits, (1 << bits) - 1
        for place in range(per):
            part = (codes >> (place * bits)) & top
            at_end += int(np.count_nonzero((part == 0) | (part == top)))
        total += per * len(codes)
    return at_end / max(1, total)
