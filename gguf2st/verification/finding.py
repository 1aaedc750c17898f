"""What a rule finds, how bad it is for whom, and the register of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf2st.verification.context import Context

ALL_ENGINES = ("vllm", "sglang", "hf")


class Effect(StrEnum):
    """What a finding does to an engine, the worst last."""

    NOTE = "note"
    RISK = "risk"  # something beside plain serving suffers, or a release other than the known one
    SLOWER = "slower"
    WRONG = "silently wrong"
    CRASH = "crash"


class Mend(StrEnum):
    """The kind of rewrite that would mend a finding."""

    NOTHING = "nothing"  # a choice of the user, or nothing that a rewrite could change
    DEQUANTIZE = "dequantize"  # modules become bf16 and are excepted from quantization
    MATCH = "match"  # quantization_config is derived anew from the tensors
    CONFIG = "config"  # keys of config.json get `values` (None: the key goes)
    INDEX = "index"  # the index is written anew from the headers
    RENAME = "rename"  # tensors get other names: `names`
    CAST = "cast"  # tensors get another dtype: `values` name -> dtype
    DROP = "drop"  # tensors or files that don't belong there go
    MISSING = "missing"  # what isn't there can't be mended


@dataclass(frozen=True)
class Remedy:
    """What mends a finding: in words for people, and as data for `repair`.

    `modules` are names without leaf; `names` are old -> new; `values` belong to dotted
    keys of config.json or, for `CAST`, to tensors.
    """

    text: str
    mend: Mend = Mend.NOTHING
    modules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, for one engine ("": for all).

    `subjects` are the tensors, modules, files or config entries concerned, all of them; `message` is
    what the user of the engine will see, where that is known.
    """

    rule: str
    engine: str
    effect: Effect
    subjects: tuple[str, ...]
    reason: str
    remedy: Remedy
    message: str = ""

    @property
    def fatal(self) -> bool:
        """Whether the engine doesn't load the checkpoint right."""
        return self.effect in (Effect.WRONG, Effect.CRASH)


Check = Callable[["Context"], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """One invariant. `title` is its name in a few words; `check`'s docstring has the source.

    `needs` says what must be known for it: the names of the "layers" that engines build, or
    all "tensors" that the model class has. `deep` rules read values; `against` ones compare them with
    a GGUF, and it is the comparison that finds what breaks them.
    """

    id: str
    title: str
    engines: tuple[str, ...]
    check: Check
    needs: tuple[str, ...] = ()
    deep: bool = False
    against: bool = False

    @property
    def doc(self) -> str:
        """What it says and where that was read."""
        return " ".join((self.check.__doc__ or "").split())


RULES: dict[str, Rule] = {}


def rule(
    identity: str,
    title: str,
    engines: tuple[str, ...] = ALL_ENGINES,
    *,
    needs: tuple[str, ...] = (),
    deep: bool = False,
    against: bool = False,
) -> Callable[[Check], Check]:
    """Register a check as the rule of that id."""

    def register(check: Check) -> Check:
        RULES[identity] = Rule(identity, title, engines, check, needs, deep, against)
        return check

    return register
