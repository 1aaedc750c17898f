"""What an engine is to this package: names, matching rules, kernel rules.

Nothing here imports an engine. Each engine's folder holds three things that were
read from its source: `models.py` (how its model classes name and stack layers),
`matching.py` (what it makes of a quantization_config) and `kernels.py` (which
shapes its kernels take).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

from gguf2st.scheme import Scheme

Config = Mapping[str, Any]


class Kind(StrEnum):
    """How a layer is split between tensor-parallel ranks, and which methods it takes."""

    COLUMN = "column"  # rows are split
    MERGED = "merged"  # several matrices stacked, the rows of each are split
    QKV = "qkv"  # like merged, but heads of k and v are repeated where there are too few
    ROW = "row"  # columns are split
    REPLICATED = "replicated"
    EXPERTS = "experts"  # all experts of a block: gate and up merged, down by columns
    HEAD = "head"  # output head, quantized only where a rule names it
    EMBEDDING = "embedding"


@dataclass(frozen=True)
class EngineModule:
    """A layer of an engine's model, made of one or several modules of the checkpoint.

    `name` is what the engine matches its rules with, `layer_class` the class name that a
    target such as "Linear" is compared with, `shards` the modules of the checkpoint in
    the order in which they are stacked. Experts are matched through `probes` instead.
    """

    name: str
    kind: Kind
    layer_class: str
    shards: tuple[str, ...]
    probes: tuple[str, ...] = ()
    unquantized: str = ""  # why the engine never quantizes it
    only_weight: str = ""  # why its loader needs a tensor called "weight" (no packed codes)
    cuts: tuple[str, ...] = ()  # of each shard, the widths that it is cut into: "key key value"
    partner: str = ""  # another layer, which the engine may join it with: one scheme for both
    drafter: bool = False  # belongs to the MTP drafter, a model of its own


class Cause(StrEnum):
    """Why an engine refuses a layer."""

    NONE = ""
    PARTLY = "some shards of a fused layer are excepted"
    NO_TARGET = "no target matches"
    SCHEMES = "the experts' projections have different schemes"
    FORMAT = "the config's format"
    METHOD = "the method isn't there"
    EXPERTS = "a layout of experts that it doesn't read"
    GROUPS = "groups don't lie within a rank"
    GROUP_SIZE = "no kernel has groups of that size"
    WORDS = "words don't lie within a rank"
    TILES = "the matrix doesn't fill the kernel's tiles"
    KERNEL = "no kernel takes it"
    NAME = "its loader needs a tensor called weight"


@dataclass(frozen=True)
class Outcome:
    """What an engine's matching makes of a layer.

    `scheme` is None where the layer stays unquantized; `error` is what the engine
    raises, and `cause` sorts it; `rule` is the entry of the config that decided, where there is one.
    """

    scheme: Scheme | None = None
    rule: str = ""
    error: str = ""
    cause: Cause = Cause.NONE


@dataclass(frozen=True)
class Matrix:
    """A layer as its kernel sees it, before it is split between ranks.

    `rows` are the widths that are stacked, in the engine's order (of q, k, v; of the four
    parts of in_proj_qkvz). For experts they are the widths of gate and up, and `columns`
    is the hidden size. `head` is the width of one head of k and v.
    """

    name: str
    kind: Kind
    rows: tuple[int, ...]
    columns: int
    head: int = 0
    only_weight: str = ""

    def per_rank(self, ranks: int) -> Matrix | None:
        """The part of one rank, or None where this number of ranks can't split the layer at all."""
        rows, columns = self.rows, self.columns
        if self.kind is Kind.ROW:
            if columns % ranks:
                return None
            columns //= ranks
        elif self.kind is not Kind.REPLICATED:
            split = []
            for index, width in enumerate(rows):
                # A rank holds at least one whole head of k and v.
                least = self.head if self.kind is Kind.QKV and index else 0
                if width % ranks and width > least * ranks:
                    return None
                split.append(max(width // ranks, least))
            rows = tuple(split)
        return replace(self, rows=rows, columns=columns)


@dataclass(frozen=True)
class Deployment:
    """Where a checkpoint shall run.

    `compute_capability` is 75, 80, 90, ...; None stands for any GPU from 80 on.
    `dtype` is config.json's: "bfloat16" or "float16".
    """

    tensor_parallel: tuple[int, ...] = (1,)
    compute_capability: int | None = None
    cpu: bool = False
    dtype: str = "bfloat16"

    def below(self, capability: int) -> bool:
        """Whether the GPU is older than that."""
        return self.compute_capability is not None and self.compute_capability < capability


@dataclass(frozen=True)
class Verdict:
    """Why an engine can't run a layer (or ""), and what it would run slowly or differently."""

    refusal: str = ""
    notes: tuple[str, ...] = ()
    cause: Cause = Cause.NONE  # of the refusal


@dataclass(frozen=True)
class Checkpoint:
    """What matching may look at beside the config: which modules hold codes, and all names.

    `plain` are names of unquantized tensors (with leaf), which some engines derive rules from.
    """

    quantized: Collection[str] = ()
    plain: Sequence[str] = ()

    @cached_property
    def beside_experts(self) -> list[str]:
        """Quantized modules that are no single expert."""
        return sorted(name for name in self.quantized if ".experts." not in name)


class Engine(Protocol):
    """A serving engine.

    `name` is "vllm", "sglang" or "hf", `title` what users call it. `unchecked` are the
    quantization methods whose matching rules aren't known, `never_excepted` those
    that quantize layers of a kind whatever their list of exceptions says. With `alike_experts`
    the experts of all blocks share one scheme.
    """

    name: str
    title: str
    unchecked: frozenset[str]
    never_excepted: frozenset[tuple[str, Kind]]
    alike_experts: frozenset[str]

    def model_classes(self) -> Sequence[str]:
        """Model classes whose layers are known."""
        ...

    def module_names(
        self, model_class: str, names: Sequence[str]
    ) -> dict[str, EngineModule | None]:
        """Modules of a checkpoint (no leaf) -> the layers they become.

        Modules of one layer share one object. None: no layer that could be quantized
        (embeddings, norms, convolutions, what the engine doesn't load).
        """
        ...

    def outcome(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """What the engine makes of a quantization_config for this layer."""
        ...

    def target_refusal(
        self,
        model_class: str,
        quant_method: str,
        scheme: Scheme,
        deployment: Deployment,
        *,
        experts: bool = False,
    ) -> str:
        """Why the engine can't serve such a checkpoint at all, whatever the shapes; "" if it can.

        `experts` tells that the scheme is used for experts.
        """
        ...

    def target_notes(
        self, quant_method: str, scheme: Scheme, deployment: Deployment
    ) -> tuple[str, ...]:
        """What works, but not as fast, as written, or without further packages."""
        ...

    def verdict(
        self, matrix: Matrix, quant_method: str, scheme: Scheme, deployment: Deployment
    ) -> Verdict:
        """Whether a kernel takes the layer at every requested number of ranks."""
        ...
