"""Blocks to decode, and a comparison that wants every bit equal."""

import numpy as np

from gguf2st.gguf.blocks import BlockType, known_block_types

KINDS = {kind.name: kind for kind in known_block_types()}

# Half-precision bits: zeros, smallest and largest subnormals, smallest and largest
# normal numbers, one, a usual scale, infinities, quiet and signalling NaN.
SPECIAL_HALVES = np.array(
    [
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x3C00, 0xBC00),
        *(0x1C3A, 0x9C3A, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7D55, 0xFC01),
    ],
    np.uint16,
)


def random_bytes(kind: BlockType, count: int, seed: int) -> np.ndarray:
    """`count` blocks of random bytes: uint8 (count, block_bytes)."""
    return np.random.default_rng([kind.code, seed]).integers(
        0, 256, (count, kind.block_bytes), np.uint8
    )


def sound_bytes(kind: BlockType, count: int, seed: int) -> np.ndarray:
    """As `random_bytes`, with finite scales of a usual size."""
    raw = random_bytes(kind, count, seed)
    for offset in half_offsets(kind):
        raw[:, offset + 1] = 0x1C | raw[:, offset + 1] & 0x83
    if kind.name == "IQ1_M":
        raw[:, 55] = raw[:, 55] & 0x8F | 0x10
    return raw


def half_offsets(kind: BlockType) -> list[int]:
    """Where the half-precision fields of a block begin."""
    fields = (kind.layout.fields or {}).values()
    return [offset for dtype, offset, *_ in fields if dtype == np.float16]


def crafted_bytes(kind: BlockType) -> np.ndarray:
    """Blocks with every special scale over no bits, all bits and random bits."""
    fillings = [np.zeros((1, kind.block_bytes), np.uint8), np.full((1, kind.block_bytes), 255)]
    base = np.concatenate([*fillings, random_bytes(kind, 6, seed=1)]).astype(np.uint8)
    if kind.name == "IQ1_M":
        return np.concatenate([base, *(_with_spread_half(base, half) for half in SPECIAL_HALVES)])
    if kind.name in ("MXFP4", "NVFP4"):
        return np.concatenate([base, *(_with_byte_scales(base, kind, byte) for byte in range(256))])
    blocks = [base]
    for offset in half_offsets(kind):
        for half in SPECIAL_HALVES:
            changed = base.copy()
            changed[:, offset : offset + 2] = np.array([half], "<u2").view(np.uint8)
            blocks.append(changed)
    return np.concatenate(blocks)


def _with_spread_half(base: np.ndarray, half: np.uint16) -> np.ndarray:
    """IQ1_M keeps a quarter of d in the top four bits of each of its last four uint16."""
    changed = base.copy()
    for quarter in range(4):
        high = 48 + 2 * quarter + 1
        changed[:, high] = changed[:, high] & 15 | (int(half) >> 4 * quarter & 15) << 4
    return changed


def _with_byte_scales(base: np.ndarray, kind: BlockType, byte: int) -> np.ndarray:
    changed = base.copy()
    changed[:, : 1 if kind.name == "MXFP4" else 4] = byte
    return changed


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Every bit must agree, except that any NaN equals any other."""
    found, expected = found.ravel(), expected.ravel()
    assert found.dtype == expected.dtype == np.float32
    assert found.size == expected.size
    same = found.view(np.uint32) == expected.view(np.uint32)
    same |= np.isnan(found) & np.isnan(expected)
    wrong = np.flatnonzero(~same)
    first = wrong[:1]
    assert not wrong.size, (
        f"{wrong.size} differ, first at {first}: {found[first]} {expected[first]}"
    )
