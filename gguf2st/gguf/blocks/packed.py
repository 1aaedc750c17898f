"""Rows that are still packed, for what decodes them piece by piece by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gguf2st.gguf.blocks.base import BlockType
from gguf2st.gguf.blocks.kernels import kernel_of
from gguf2st.gguf.blocks.rows import decode_rows


@dataclass(frozen=True)
class PackedRows:
    """Blocks of rows, and what they are.

    `raw` is uint8 (rows, columns / block_size * block_bytes).
    """

    kind: BlockType
    raw: npt.NDArray[np.uint8]
    columns: int
    big_endian: bool = False

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the values: (rows, columns)."""
        return len(self.raw), self.columns

    @property
    def has_kernel(self) -> bool:
        """Whether kernels can decode the blocks where they lie."""
        usable = self.raw.flags.c_contiguous and self.raw.flags.writeable
        return usable and not self.big_endian and kernel_of(self.kind) is not None

    def decode(self) -> npt.NDArray[np.float32]:
        """The values, float32 (rows, columns)."""
        return decode_rows(self.kind, self.raw, self.columns, big_endian=self.big_endian)
