"""How the tables of model classes are written and looked up.

A name's numbers are its layer and expert: "model.layers.7.mlp.experts.3.gate_proj" is
found as "model.layers.{}.mlp.experts.{}.gate_proj" with the numbers 7 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from gguf2st.engines.base import EngineModule, Kind

# packed_modules_mapping: the last component of a fused name -> those of its shards
Packed = dict[str, tuple[str, ...]]

EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_PARTS = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Layer:
    """A layer of a block: `path` is the engine's name of it, `parts` the checkpoint's modules.

    `probes` are the names that an engine looks experts up with, below `path`. `cuts` says for
    each part into which widths the engine cuts it ("key key value"), where it does. `partner`
    is the path of another layer of the block that must have the same scheme.
    """

    path: str
    kind: Kind
    layer_class: str
    parts: tuple[str, ...]
    probes: tuple[str, ...] = ()
    unquantized: str = ""
    only_weight: str = ""
    cuts: tuple[str, ...] = ()
    partner: str = ""


@dataclass(frozen=True)
class Block:
    """Layers below a prefix: `checkpoint` is the prefix in the files, `engine` the engine's own."""

    checkpoint: str
    engine: str
    layers: tuple[Layer, ...]
    drafter: bool = False


@dataclass(frozen=True)
class Mapper:
    """Renames that an engine applies to the names in a quantization_config before it matches."""

    substr: Mapping[str, str] = field(default_factory=dict)
    prefix: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelTable:
    """A model class of an engine.

    `packed` is its packed_modules_mapping: which names a fused name stands for when rules
    are matched. It isn't always what the class fuses, and that is the point of keeping it.
    """

    blocks: tuple[Block, ...]
    packed: Packed = field(default_factory=dict)
    mapper: Mapper = Mapper()
    drafter_packed: Packed = field(default_factory=dict)

    @cached_property
    def _index(self) -> dict[str, tuple[Block, Layer, int]]:
        return {
            block.checkpoint + part: (block, layer, place)
            for block in self.blocks
            for layer in block.layers
            for place, part in enumerate(layer.parts)
        }

    def modules(self, names: Sequence[str]) -> dict[str, EngineModule | None]:
        """Modules of the checkpoint -> layers; modules of one layer get one object."""
        found: dict[str, tuple[Block, Layer, tuple[int, ...], int] | None] = {}
        # A name may stand for many layers (SGLang's Gemma 2), so the number belongs to the key.
        members: dict[tuple[str, bool, int], list[tuple[tuple[int, ...], int, str]]] = {}
        for name in names:
            pattern, numbers = _split(name)
            entry = self._index.get(pattern)
            if entry is None:
                found[name] = None
                continue
            block, layer, place = entry
            found[name] = (block, layer, numbers, place)
            key = _key(block, layer, numbers)
            members.setdefault(key, []).append((numbers, place, name))
        modules = {
            key: tuple(name for *_, name in sorted(shards)) for key, shards in members.items()
        }
        built: dict[tuple[str, bool, int], EngineModule] = {}
        result: dict[str, EngineModule | None] = dict.fromkeys(names)
        for name, place_of in found.items():
            if place_of is None:
                continue
            block, layer, numbers, _ = place_of
            key = _key(block, layer, numbers)
            if key not in built:
                own = key[0]
                built[key] = EngineModule(
                    name=own,
                    kind=layer.kind,
                    layer_class=layer.layer_class,
                    shards=modules[key],
                    probes=tuple(f"{own}.{probe}" for probe in layer.probes),
                    unquantized=layer.unquantized,
                    only_weight=layer.only_weight,
                    cuts=layer.cuts,
                    partner=layer.partner and (block.engine + layer.partner).format(*numbers),
                    drafter=block.drafter,
                )
            result[name] = built[key]
        return result

    def layers(self) -> Iterator[tuple[Block, Layer]]:
        """All layers with their blocks."""
        for block in self.blocks:
            for layer in block.layers:
                yield block, layer


def _key(block: Block, layer: Layer, numbers: tuple[int, ...]) -> tuple[str, bool, int]:
    name = (block.engine + layer.path).format(*numbers)
    return name, block.drafter, numbers[0] if numbers else -1


@lru_cache(maxsize=1 << 17)  # the same names are looked up for each engine
def _split(name: str) -> tuple[str, tuple[int, ...]]:
    components = name.split(".")
    numbers = tuple(int(c) for c in components if c.isdigit())
    return ".".join("{}" if c.isdigit() else c for c in components), numbers


def siblings(path: str, parts: str) -> tuple[str, ...]:
    """Names beside `path`: ("self_attn.qkv_proj", "q_proj k_proj") -> ("self_attn.q_proj", ...)."""
    parent = path.rpartition(".")[0]
    return tuple(f"{parent}.{part}" if parent else part for part in parts.split())
