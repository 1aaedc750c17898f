"""Value heads of gated delta nets that lie in another order than the model has them in.

Each key head is read by several value heads, which lie one behind the other in checkpoints.
llama.cpp's files of Qwen3.5 have all first ones, then all second ones (conversion/qwen.py,
`_reorder_v_heads`); those of Qwen3-Next have them as checkpoints do. Who converts can forget to put them
back, or do it where it was done already or never undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gguf2st.verification.against.places import Place, Sizes, tiled_heads

TILED = (
    "tiled, all first value heads of the key heads before all second ones, as in llama.cpp's files"
)
TWICE = "taken for tiled, though they weren't (any more), and put back once too often"
_HIGH = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out")
_ONE_EACH = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt.bias")


def other_orders(place: Place, sizes: Sizes) -> Iterator[tuple[str, Place]]:
    """A place as it were if the checkpoint's value heads lay in another order, and which that is.

    Raises `SizeError` for sizes that don't fit.
    """
    if place.stem not in (*_HIGH, *_ONE_EACH) or "linear_attn." not in place.item:
        return
    across = place.stem == "ssm_out" or place.height == 1
    width = sizes["linear_value_head_dim"] if place.stem in _HIGH else 1
    tiled = tiled_heads(sizes, width, place.width if across else place.height)
    back = np.argsort(tiled)
    if (tiled == np.arange(len(tiled))).all():
        return  # one value head for each key head
    own = place.columns if across else place.rows
    for name, order in ((TILED, back), (TWICE, tiled)):
        changed = order if own is None else own[order]
        yield name, replace(place, columns=changed) if across else replace(place, rows=changed)
