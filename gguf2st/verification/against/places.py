"""Where the values of a checkpoint's tensor lie in a GGUF, and how they were changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.verification.grids import Change

Order = npt.NDArray[np.int64]


class SizeError(ValueError):
    """A size that the converter takes from config.json isn't there or can't be."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, from where llama.cpp's converter takes them: config.json."""

    config: Mapping[str, Any]

    def __getitem__(self, key: str) -> int:
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SizeError(f"config.json has no usable {key}")
        return value

    @property
    def kv_heads(self) -> int:
        """Key and value heads; as many as query heads where config.json doesn't say."""
        key = "num_key_value_heads"
        return self[key] if self.config.get(key) is not None else self["num_attention_heads"]


@dataclass(frozen=True)
class Part:
    """Some rows of a matrix, which become a tensor of a block, "attn_q" say.

    `rows` and `columns` are numbers of the checkpoint's rows and columns in the order of the
    GGUF; None means all of them, in their order.
    """

    stem: str
    rows: Order | None = None
    columns: Order | None = None


# What becomes of a matrix of so many rows and columns.
Split = Callable[[Sizes, int, int], list[Part]]


@dataclass(frozen=True, eq=False)
class Place:
    """One matrix of the checkpoint (or part of it) and the rows of a GGUF tensor that it becomes.

    `item` is the checkpoint's tensor or module, `entry` its number in a stack there. `first` is the
    first row in the GGUF's tensor `gguf`, `change` what is done to values.
    Vectors are matrices of one row. `block`, `stem` and `expert` say which tensor it is, however
    it is stored.
    """

    item: str
    entry: int
    gguf: str
    first: int
    shape: tuple[int, int]
    rows: Order | None
    columns: Order | None
    transposed: bool
    change: Change
    block: str
    stem: str
    suffix: str
    expert: int

    @property
    def height(self) -> int:
        """Rows in the GGUF."""
        return self.shape[0] if self.rows is None else len(self.rows)

    @property
    def width(self) -> int:
        """Values of each."""
        return self.shape[1] if self.columns is None else len(self.columns)

    @property
    def named(self) -> str:
        """The checkpoint's name for it."""
        stacked = "_exps" in self.stem and ".experts." in self.item
        alone = not stacked or f".experts.{self.expert}." in self.item
        return self.item if alone else f"{self.item}[{self.expert}]"


def rotary_pairs(heads: int, rows: int) -> Order:
    """LlamaModel.permute (llama.py): the two halves of each head become alternating pairs."""
    if rows % (2 * heads):
        raise SizeError(f"{heads} heads of config.json don't divide {rows} rows")
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def tiled_heads(sizes: Sizes, width: int, total: int) -> Order:
    """_reorder_v_heads (qwen.py) of the last rows: value heads by key head -> by their rank there.

    The first rows, those of queries and keys, stay.
    """
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    kept = total - values * width
    if values % keys or kept < 0:
        raise SizeError(
            f"{keys} key and {values} value heads of config.json don't fit {total} rows"
        )
    tiled = np.arange(kept, total).reshape(keys, values // keys, width).swapaxes(0, 1)
    return np.concatenate((np.arange(kept), tiled.reshape(-1)))
