"""Goes from a checkpoint's tensors to those of a GGUF, the way llama.cpp's converter does."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gguf2st.gguf import TensorInfo
from gguf2st.verification.against.families import MTP, OUTSIDE, Family, Table, Tower
from gguf2st.verification.against.places import Part, Place, SizeError, Sizes, Split
from gguf2st.verification.context import Context
from gguf2st.verification.grids import Change
from gguf2st.verification.stored import Layout, Stored

Tensors = Mapping[str, TensorInfo]
TEXT, DRAFT, VISION = "text", "mtp", "vision"
# base.py and qwen.py take these away before they look at a name; newer releases of transformers
# and older ones put different ones before the same names.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.mtp.", "mtp."),
)
_LAYER = re.compile(r"(model|mtp)\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# What checkpoints hold beside weights, and GGUFs don't: what rotary embeddings and engines' caches
# are computed with.
_BESIDE = re.compile(r".*(rotary_emb\.inv_freq|\.[kv]_scale|\.(in|out)put_scale)")
_DEEPSTACK = "visual.deepstack_merger_list."
_VOCABULARY = ("token_embd", "output")
# Computed by the converter, or factors of other tensors.
_COMPUTED = re.compile(r"(blk\.\d+\.)?(rope_freqs\.weight|attn_rot_embd)|.*\.(input_)?scale")


@dataclass(frozen=True)
class Item:
    """A matrix or vector of the checkpoint: `name` there, `canonical` without prefixes of wrappers."""

    name: str
    canonical: str
    matrix: Stored
    entries: int
    shape: tuple[int, int]

    @property
    def component(self) -> str:
        """The part of the model that it belongs to."""
        if self.canonical.startswith("mtp."):
            return DRAFT
        vision = ("visual.", "vision_tower.", "multi_modal_projector.")
        return VISION if self.canonical.startswith(vision) else TEXT


@dataclass
class Forward:
    """Where everything lies. `alone` are items that have no place, `uncovered` GGUF tensors
    of which some rows are no one's, `unsized` items -> why their place can't be told."""

    places: list[Place] = field(default_factory=list)
    alone: list[Item] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    unsized: dict[str, str] = field(default_factory=dict)


def items_of(context: Context) -> list[Item]:
    """Everything that a checkpoint holds, matrices as they are stored and all else unquantized."""
    found = []
    taken: set[str] = set()
    for module, matrix in context.stored.items():
        taken.update(matrix.tensors)
        first = next(iter(matrix.leaves.values()))
        stacked = matrix.layout is Layout.STACKED or "" in matrix.leaves
        name = module if stacked else f"{module}.weight"
        entries = first.shape[0] if stacked and first.shape else 1
        found.append(Item(name, _canonical(name), matrix, entries, matrix.shape))
    for name, tensor in context.view.tensors.items():
        if name in taken or _BESIDE.fullmatch(name) or not tensor.shape:
            continue
        vector = len(tensor.shape) == 1
        shape = (1, tensor.shape[0]) if vector else (tensor.shape[0], math.prod(tensor.shape[1:]))
        leaves = {name.rpartition(".")[2]: tensor}
        matrix = Stored(name, Layout.DENSE, leaves, shape)
        found.append(Item(name, _canonical(name), matrix, 1, shape))
    return found


def _canonical(name: str) -> str:
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def forward(items: list[Item], rules: Family | Tower, sizes: Sizes, to: Tensors) -> Forward:
    """Find the place of every item in the tensors of a GGUF.

    The items are those of a language model with its family and the sizes of its part of config.json,
    or those of a vision tower with that and the sizes of `vision_config`.
    """
    result = Forward()
    covered: dict[str, int] = {}
    to = _named_as_today(to)
    untied = any(item.canonical.startswith("lm_head.") for item in items)
    for item in items:
        try:
            places = list(_places(item, rules, sizes, to))
            embedding = item.canonical.startswith("model.embed_tokens.")
            if embedding and not untied and "output.weight" in to:  # tied here, and apart there
                places += _places(replace(item, canonical="lm_head.weight"), rules, sizes, to)
        except ValueError as error:
            result.unsized[item.name] = str(error)
            continue
        if not places:
            result.alone.append(item)
        for place in places:
            covered[place.gguf] = covered.get(place.gguf, 0) + place.height * place.width
        result.places += places
    result.uncovered = [
        tensor.name
        for tensor in to.values()
        if covered.get(tensor.name, 0) < tensor.elements and not _COMPUTED.fullmatch(tensor.name)
    ]
    return result


def _named_as_today(to: Tensors) -> Tensors:
    """Vision towers of before May 2025 have up and down swapped (llama.cpp's tools/mtmd/clip.cpp)."""
    down, norm = to.get("v.blk.0.ffn_down.weight"), to.get("v.blk.0.ln1.weight")
    if down is None or norm is None or down.shape[0] == norm.shape[0]:
        return to
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return {re.sub("ffn_(up|down)", lambda m: swapped[m[0]], name): t for name, t in to.items()}


@dataclass(frozen=True)
class _Name:
    """A tensor of a GGUF: `block` ("blk.3." or ""), stem, suffix, and the expert's number."""

    block: str
    stem: str
    suffix: str
    expert: int = 0

    @property
    def full(self) -> str:
        return self.of(self.stem)

    def of(self, stem: str) -> str:
        """The name of another tensor of the block."""
        return f"{self.block}{stem}{'.' if self.suffix else ''}{self.suffix}"


def _places(item: Item, rules: Family | Tower, sizes: Sizes, to: Tensors) -> Iterator[Place]:
    block, table, rest = _table_of(item, rules, sizes)
    tensors = list(item.matrix.leaves.values())
    vector = len(tensors) == 1 and len(tensors[0].shape) == 1
    expert = _EXPERT.search(rest)
    rest = _EXPERT.sub(".experts.*.", rest)
    suffix = ""
    if rest not in table:
        rest, _, suffix = rest.rpartition(".")
    if rest not in table or suffix not in ("", "weight", "bias"):
        return
    stacked = item.entries > 1 or "" in item.matrix.leaves
    turned = isinstance(rules, Family) and rules.transposed
    transposed = turned and stacked and item.matrix.layout is Layout.DENSE
    shape = item.shape[::-1] if transposed else item.shape
    for part in _parts(table[rest], sizes, shape, vector):
        end = suffix or ("" if "." in part.stem or part.stem == "ssm_a" else "weight")
        for entry in range(item.entries):
            number = entry if stacked else int(expert[1]) if expert else 0
            name = _Name(block, part.stem, end, number)
            height = shape[0] if part.rows is None else len(part.rows)
            for tensor, first in _homes(name, height, to):
                rows = part.rows
                if name.stem in _VOCABULARY and tensor.shape[0] < shape[0]:
                    rows = np.arange(tensor.shape[0])  # gemma.py cuts what has no token
                change = _change(part.stem, rules)
                yield Place(
                    item.name, entry, tensor.name, first, shape, rows, part.columns, transposed, change,
                    block, part.stem, end, number,
                )  # fmt: skip


def _table_of(item: Item, rules: Family | Tower, sizes: Sizes) -> tuple[str, Table, str]:
    """What the names of the block begin with, the table that holds the item, and its name there."""
    name = item.canonical
    if isinstance(rules, Tower):
        if name.startswith(rules.layers):
            number, _, rest = name.removeprefix(rules.layers).partition(".")
            return f"v.blk.{number}.", rules.layer, rest
        if name.startswith(_DEEPSTACK):
            number, _, rest = name.removeprefix(_DEEPSTACK).partition(".")
            layers = sizes.config.get("deepstack_visual_indexes")
            if not isinstance(layers, list) or not int(number) < len(layers):
                raise SizeError("deepstack_visual_indexes of config.json has no entry for it")
            return f"v.deepstack.{layers[int(number)]}.", rules.deepstack, rest
        return "", rules.outside, name
    if found := _LAYER.fullmatch(name):
        first = sizes["num_hidden_layers"] if found[1] == "mtp" else 0
        return f"blk.{first + int(found[2])}.", rules.layer, found[3]
    if name.startswith("mtp."):
        return f"blk.{sizes['num_hidden_layers']}.", MTP, name
    return "", OUTSIDE, name


def _parts(target: str | Split, sizes: Sizes, shape: tuple[int, int], vector: bool) -> list[Part]:
    if isinstance(target, str):
        return [Part(target)]
    if vector:  # its values are what a matrix has rows of
        return [Part(part.stem, None, part.rows) for part in target(sizes, shape[1], 1)]
    return target(sizes, *shape)


def _homes(name: _Name, height: int, to: Tensors) -> list[tuple[TensorInfo, int]]:
    """The GGUF's tensor that holds it, and the row at which it begins there; or nothing."""
    found = to.get(name.full)
    if found is not None:
        stacked = name.stem.endswith("_exps") and len(found.shape) == 3
        return [(found, name.expert * found.shape[1] if stacked else 0)]
    if name.stem == "output" and "token_embd.weight" in to:  # there, both are the same
        return [(to["token_embd.weight"], 0)]
    joined = to.get(name.of("attn_qkv"))
    if name.stem in ("attn_q", "attn_k", "attn_v") and joined is not None:
        # --fuse-qkv (base.py); there are as many keys as values
        total = joined.shape[0]
        begin = {"attn_q": 0, "attn_k": total - 2 * height, "attn_v": total - height}
        return [(joined, begin[name.stem])]
    joined = to.get(name.of("ffn_gate_up_exps"))
    if name.stem in ("ffn_gate_exps", "ffn_up_exps") and joined is not None:
        # --fuse-gate-up-exps (base.py)
        below = height if name.stem == "ffn_up_exps" else 0
        return [(joined, name.expert * joined.shape[1] + below)]
    single = to.get(name.of(f"{name.stem.removesuffix('_exps')}.{name.expert}"))
    return [(single, 0)] if single is not None else []  # of before experts were stacked


def _change(stem: str, rules: Family | Tower) -> Change:
    if isinstance(rules, Tower):
        return Change.PLUS_ONE if stem in rules.shifted else Change.NONE
    if stem == "ssm_a":
        return Change.NEGATIVE_POWER
    shifted = rules.shifted and stem.endswith("norm") and stem != "ssm_norm"
    return Change.PLUS_ONE if shifted else Change.NONE
