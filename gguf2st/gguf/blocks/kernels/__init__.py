"""Compiled decoders: each block type's formula once more, for speed.

The modules here mirror those that describe the types: `k_quants.Q4_K` has its kernel in
`kernels.k_quants.q4_k`. A kernel gets the bytes of whole blocks, uint8 (n * block_bytes,), and
writes their values, float32 (n * block_size,), both contiguous; the values are bit for bit those
of the type's `decode_into`. Positions are those of the type's `layout`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from gguf2st.gguf.blocks.base import BY_CODE, BlockType

Kernel = Callable[[Any, Any], None]


def kernel_of(kind: BlockType) -> Kernel | None:
    """The compiled decoder of a type; None where `decode_into` has to do."""
    return kernel_named(kind.name) if sys.byteorder == "little" else None


@cache
def kernel_named(name: str) -> Kernel | None:
    """The same by the name of a type."""
    kind = next(kind for kind in BY_CODE.values() if kind.name == name)
    family = type(kind).__module__.rpartition(".")[2]
    try:
        module = importlib.import_module(f"{__name__}.{family}")
    except ModuleNotFoundError as error:
        # The type is of another package, or numba is missing.
        if error.name is None or not error.name.startswith((__name__, "numba", "llvmlite")):
            raise
        return None
    kernel: Kernel | None = getattr(module, name.lower(), None)
    return kernel
