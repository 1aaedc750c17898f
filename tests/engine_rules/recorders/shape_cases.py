"""Shapes to put to the engines' own shape rules and to ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

ROWS = (8, 48, 64, 96, 128, 1000, 4096)
COLUMNS = (64, 96, 128, 160, 320, 512)
GROUPS = (0, 16, 32, 64, 128, 256)
CAPABILITIES = (75, 80, 90, 120)


@dataclass(frozen=True)
class Integer:
    """A matrix with integer weights: (rows, columns) of one rank, split by `ranks` along columns."""

    rows: int
    columns: int
    ranks: int
    bits: int
    group_size: int
    symmetric: bool
    capability: int  # 0: CPU
    dtype: str


@dataclass(frozen=True)
class Blocks:
    """A matrix in fp8 blocks of 128: widths of the stacked parts before they are split."""

    rows: tuple[int, ...]
    columns: int
    ranks: int
    by_columns: bool


@dataclass(frozen=True)
class Experts:
    """Experts of (inner per rank, hidden)."""

    inner: int
    hidden: int
    group_size: int


def integers() -> Iterator[Integer]:
    """Whatever a user could ask for and some of what not."""
    for rows, columns, group, bits, symmetric in product(
        ROWS, COLUMNS, GROUPS, (4, 8), (True, False)
    ):
        for ranks, (capability, dtype) in product(
            (1, 2), [*product(CAPABILITIES, ("bfloat16", "float16")), (0, "bfloat16")]
        ):
            # The layout holds whole groups only, before anything is split.
            if group and (columns * ranks) % group:
                continue
            if capability == 75 and dtype == "bfloat16":
                continue
            yield Integer(rows, columns, ranks, bits, group, symmetric, capability, dtype)


def blocks() -> Iterator[Blocks]:
    """One matrix, two or three stacked ones, split by rows or by columns."""
    widths = (48, 128, 192, 256, 384)
    for ranks, columns in product((1, 2, 4), (256, 384, 512)):
        for a in widths:
            yield Blocks((a * ranks,), columns, ranks, False)
            yield Blocks((a,), columns, ranks, True)
            for b in widths:
                yield Blocks((a * ranks, b * ranks), columns, ranks, False)
                yield Blocks((a * ranks, b * ranks, b * ranks), columns, ranks, False)


def experts() -> Iterator[Experts]:
    """Widths that occur and some that don't."""
    for inner, hidden, group in product(
        (32, 64, 96, 128, 192, 256, 512, 768), (64, 128, 192, 2048, 2880), (0, 32, 64, 128)
    ):
        yield Experts(inner, hidden, group)
