"""Module names in configurations: what engines join, and expressions that hit some modules only.

Configurations name modules as the checkpoint does, engines build others: they load
q_proj, k_proj and v_proj as one `qkv_proj`, prepend or drop a prefix, and make all
experts of a block one module. So an expression must hit a module under each of these
names, and must hit no module of the other kind under any; `cover` finds such
expressions from the names at hand and keeps none that it hasn't checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gguf2st.errors import VerificationError

# What some engine loads as one matrix -> the modules that it consists of
# (packed_modules_mapping of vLLM's and SGLang's model classes).
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "qkv": ("q", "k", "v"),
    "w13": ("w1", "w3"),
}
_JOINED_OF = {shard: joined for joined, shards in JOINED.items() for shard in shards}
_EXPERT = re.compile(r"\.experts\.\d+\.")
_BLOCK = re.compile(r"(?:^|(?<=\.))(\w+)\.(\d+)\.")


def representatives(names: Iterable[str]) -> list[str]:
    """Names in their order, with one expert for all experts of a block: engines treat them as one."""
    return list(dict.fromkeys(_EXPERT.sub(".experts.0.", name) for name in names))


def is_expert(name: str) -> bool:
    """Whether a module is one of a block's routed experts."""
    return _EXPERT.search(name) is not None


def joined(names: Collection[str]) -> list[str]:
    """Names of the matrices that engines make of at least two of these modules."""
    shards: dict[str, int] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in _JOINED_OF and not is_expert(name):
            key = f"{parent}.{_JOINED_OF[leaf]}"
            shards[key] = shards.get(key, 0) + 1
    return [name for name, count in shards.items() if count > 1]


def check_undivided(groups: Iterable[Iterable[str]]) -> None:
    """Check that no matrix which engines join, and no block's experts, are spread over groups.

    Raises `VerificationError` naming the first: engines refuse such a checkpoint.
    """
    owners: dict[str, int] = {}
    for number, names in enumerate(groups):
        for name in names:
            whole = _whole(name)
            if owners.setdefault(whole, number) != number:
                raise VerificationError(
                    f"{name} is to be quantized otherwise than the rest of {whole}; please report this."
                )


def _whole(name: str) -> str:
    """What an engine makes a module a part of, or the module itself."""
    parent, _, leaf = name.rpartition(".")
    if leaf in _JOINED_OF and not is_expert(name):
        return f"{parent}.{_JOINED_OF[leaf]}"
    return _whole_experts(name)


def under_one_scale(name: str) -> str:
    """The matrix that an engine makes a module a part of, also within an expert; or the module itself."""
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.{_JOINED_OF[leaf]}" if leaf in _JOINED_OF else name


def engine_names(names: Iterable[str]) -> list[str]:
    """Modules as checkpoint and engines call them: one by one, joined, and experts as a whole."""
    alone = representatives(names)
    return list(dict.fromkeys([*alone, *joined(alone), *map(_whole_experts, alone)]))


def _whole_experts(name: str) -> str:
    expert = _EXPERT.search(name)
    return f"{name[: expert.start()]}.experts" if expert else name


@dataclass(frozen=True)
class Candidate:
    """Hits modules by the end of their name: `layers.3.mlp.down_proj`, `mlp.down_proj`, `lm_head`.

    With `inside`, it hits a module of that name, at a dot, and all modules inside it.
    """

    leaf: str
    parent: str = ""
    block: str = ""
    number: str = ""
    inside: bool = False

    @property
    def text(self) -> str:
        """The end of a name that it hits."""
        return ".".join(filter(None, (self.block, self.number, self.parent, self.leaf)))

    @property
    def is_root(self) -> bool:
        """Whether it stands for something outside of all blocks."""
        return not (self.parent or self.block)

    def hits(self, name: str) -> bool:
        """Whether it hits a module of that name."""
        if self.inside:
            return f".{self.text}." in f".{name}."
        return name.endswith(self.text)


def _by_root(name: str) -> Candidate:
    """A tower such as the vision model, or a module outside of all blocks such as the head."""
    root, _, rest = name.removeprefix("model.").partition(".")
    return Candidate(root, inside=bool(rest))


def _by_tail(name: str) -> Candidate:
    """The same module of every block: parent and leaf; or the experts of every block."""
    parent, _, leaf = _whole_experts(name).rpartition(".")
    return Candidate(leaf, parent.rpartition(".")[2], inside=leaf == "experts")


def _by_block(name: str) -> Candidate | None:
    """The module of one block, whatever an engine calls what lies above the blocks."""
    found = _BLOCK.search(name)
    if found is None:
        return None
    parent, _, leaf = _whole_experts(name)[found.end() :].rpartition(".")
    return Candidate(leaf, parent, found[1], found[2], inside=leaf == "experts")


_TIERS: Sequence[Callable[[str], Candidate | None]] = (_by_root, _by_tail, _by_block)


@dataclass(frozen=True)
class Cover:
    """Candidates that hit modules, and the names of those that none hits."""

    candidates: tuple[Candidate, ...]
    rest: tuple[str, ...]


def cover(
    names: Iterable[str],
    avoid: Iterable[str],
    hits: Callable[[Candidate, Collection[str]], bool] | None = None,
) -> Cover:
    """Few candidates that hit all modules `names`, however engines call them, and none of `avoid`.

    `hits` says whether a candidate hits one of some names; by default its own `hits` does.
    """
    left, against = engine_names(names), engine_names(avoid)
    check = hits or (lambda candidate, others: any(map(candidate.hits, others)))
    chosen: list[Candidate] = []
    for tier in _TIERS:
        verdicts: dict[Candidate, bool] = {}
        still = []
        for name in left:
            candidate = tier(name)
            if candidate is not None and candidate not in verdicts:
                verdicts[candidate] = not check(candidate, against)
            if candidate is None or not verdicts[candidate]:
                still.append(name)
        chosen += [candidate for candidate, good in verdicts.items() if good]
        left = [name for name in still if not any(c.hits(name) for c in chosen)]
    return Cover(tuple(chosen), tuple(left))


def expressions(candidates: Iterable[Candidate]) -> list[str]:
    """Regular expressions for `re.match` that hit what the candidates hit; similar ones are merged."""
    leaves: dict[tuple[str, str, str, bool], list[str]] = {}
    for c in candidates:
        leaves.setdefault((c.block, c.number, c.parent, c.inside), []).append(c.leaf)
    numbers: dict[tuple[str, str, bool, tuple[str, ...]], list[str]] = {}
    for (block, number, parent, inside), found in leaves.items():
        numbers.setdefault((block, parent, inside, tuple(found)), []).append(number)
    result = []
    for (block, parent, inside, ends), places in numbers.items():
        parts = (re.escape(block), _either(places), re.escape(parent), _either(ends))
        body = r"\.".join(filter(None, parts))
        result.append(rf"(.*\.)?{body}(\..*)?$" if inside else f".*{body}$")
    return result


def _either(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"({'|'.join(map(re.escape, items))})"
