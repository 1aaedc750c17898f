"""What every block type has in common: a number, a layout and a decoder."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

# What a decoder is given: blocks whose fields it asks for by name. Either a numpy array with
# the block's layout as its dtype, or torch's `TensorBlocks`.
Blocks = Any

BY_CODE: dict[int, "BlockType"] = {}
"""The one instance of every block type that this package decodes, by its number."""


class BlockType(ABC):
    """A way in which GGUF stores a few consecutive elements of a tensor row.

    A row is a run of blocks without gaps; a block never crosses rows. To add a
    type, write a subclass with `code`, `block_size`, `layout` and `decode_into`:
    it registers itself under the name of its class.

    The fields of a layout have the names of ggml's `block_*` structures
    (ggml/src/ggml-common.h). In them `d` is the scale of a whole block, `dmin`
    or `m` what is added or taken off, `qs` the codes or their low bits, `qh` the
    high bits of the codes.

    Fields of more than one byte are those that ggml reads as numbers of that
    width, so `layout.newbyteorder(">")` describes the same block in a file of a
    big-endian machine, and a decoder serves both.
    """

    code: ClassVar[int]
    """The number of the type in a tensor's entry (`enum ggml_type` in ggml.h)."""
    name: ClassVar[str]
    """The name of the type, as ggml's `enum ggml_type` spells it: "Q4_K"."""
    block_size: ClassVar[int]
    """How many elements a block holds."""
    block_bytes: ClassVar[int]
    """How many bytes a block takes."""
    layout: ClassVar[np.dtype[np.void]]
    """The fields of one little-endian block, without padding."""

    def __init_subclass__(cls) -> None:
        if "code" not in cls.__dict__:
            return  # A shared half-finished type: it has no number.
        cls.name = cls.__name__
        cls.block_bytes = cls.layout.itemsize
        if cls.code in BY_CODE:
            raise TypeError(f"{cls.name} and {BY_CODE[cls.code].name} both have number {cls.code}")
        BY_CODE[cls.code] = cls()

    def __repr__(self) -> str:
        return f"<block type {self.name}>"

    def __reduce__(self) -> tuple[Callable[[int], "BlockType"], tuple[int]]:
        # A copy is the same instance, so that types can be compared with `is`.
        return _instance, (self.code,)

    def decode(self, blocks: npt.NDArray[np.void]) -> npt.NDArray[np.float32]:
        """Return the values of some blocks.

        Args:
            blocks: shape (n,), dtype `layout` in either byte order.

        Returns:
            float32 values of shape (n, block_size), computed in float32 with the
            roundings of ggml's `dequantize_row_*` (ggml/src/ggml-quants.c). A
            scale that is infinite or not a number spoils its elements as it does
            there, without a warning.
        """
        out = np.empty((len(blocks), self.block_size), np.float32)
        if len(blocks):
            with np.errstate(invalid="ignore", over="ignore"):
                self.decode_into(blocks, out)
        return out

    @abstractmethod
    def decode_into(self, blocks: Blocks, out: Any) -> None:
        """Write the values of some blocks where the caller wants them.

        Made of the steps in `bits`, which take numpy arrays and torch tensors alike,
        and of operators with plain integers and floats, which change no dtype.

        Args:
            blocks: shape (n,) with n at least 1, dtype `layout` in either byte order;
                or `TensorBlocks` of the same fields.
            out: float32, shape (n, block_size), contiguous, of the same library and
                device; every element is overwritten.
        """


def _instance(code: int) -> BlockType:
    """Return the instance with a number, for unpickling."""
    return BY_CODE[code]


def block_layout(*fields: tuple[Any, ...]) -> np.dtype[np.void]:
    """Build the dtype of a block from its fields, given as numpy takes them."""
    return np.dtype(list(fields))
