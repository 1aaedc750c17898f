"""Memory that a worker uses again for each piece of its work.

Pages that a process gets for the first time cost several times what the work on them does, and an
allocator may give large arrays back to the system and fetch them anew for each piece.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

LINE = 64


class Buffers(threading.local):
    """Arrays by name, those of each thread its own.

    They begin at a multiple of 64 bytes. An array is valid until the same thread takes the same name again.
    """

    def __init__(self) -> None:
        self._memory: dict[str, npt.NDArray[np.uint8]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A contiguous array of that shape and dtype with anything in it."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._memory.get(name)
        if memory is None or memory.size < nbytes:
            # The old one first, or both would be there for a moment.
            self._memory.pop(name, None)
            memory = self._memory[name] = self._allocate(nbytes)
        return memory[:nbytes].view(dtype).reshape(shape)

    def _allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        # Vectors that lie across cache lines take twice the time.
        raw = np.empty(nbytes + LINE, np.uint8)
        start = -raw.ctypes.data % LINE
        return raw[start : start + nbytes]
