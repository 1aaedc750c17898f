"""Quality: the way from a format's smallest plan to its most exact one, a group of matrices at a time.

A format has rungs, from its smallest scheme to its most exact one. The order of the steps is that of
the measured gain (Kullback-Leibler divergence of the next token's distribution) for each byte: shorter
groups of columns everywhere come first, as no mix with 8 bits of the same size is as good; then 8 bits
for one class of matrices after the other, as the mapping table's [finer] lists them. Routed experts come
last: they gain ten times less for each byte than anything else (docs/quality.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gguf2st.errors import UsageError
from gguf2st.options import PlanOptions
from gguf2st.targets import Scheme, Target, target_named, target_names

LEVELS = 4
# Fractions of its multiples lie evenly: of blocks in that order, any first few are spread over all.
_GOLDEN = (math.sqrt(5) - 1) / 2

Rungs = Sequence[Sequence[Scheme]]


@dataclass(frozen=True)
class Step:
    """Groups of matrices (one, or all that must be alike) go up to a rung.

    The checkpoint grows by so many bytes.
    """

    groups: Sequence[int]
    rung: int
    growth: int


def rungs_for(target: Target, options: PlanOptions) -> Rungs:
    """The format's rungs where the user asks for a quality or a size; else none.

    Raises `UsageError` for a format without a choice, and for options that choose the same.
    """
    if options.quality is None and options.bits_per_weight is None:
        return ()
    option = "--bits-per-weight" if options.quality is None else "--quality"
    if options.quality is not None and options.bits_per_weight is not None:
        raise UsageError(
            "--quality and --bits-per-weight both choose the schemes; leave one of them out."
        )
    own = options.target
    if own.bits is not None or own.group_size is not None or own.mixed:
        raise UsageError(
            f"{option} chooses bits and group sizes by itself; leave --bits, --group-size and --scheme "
            f"out, or leave {option} out."
        )
    rungs = target.rungs()
    if not rungs:
        known = ", ".join(name for name in target_names() if target_named(name).rungs())
        raise UsageError(
            f"{target.name} has no choice of quality; leave {option} out, or take one of {known}."
        )
    if options.quality is not None:
        _check_level(target, options.quality, rungs)
    elif not 0 < (options.bits_per_weight or 0) < math.inf:
        raise UsageError(
            f"--bits-per-weight {options.bits_per_weight} isn't a size; write for example 5.5."
        )
    return rungs


def _check_level(target: Target, level: int, rungs: Rungs) -> None:
    if level not in range(LEVELS):
        raise UsageError(f"--quality {level} isn't one of the levels 0 to {LEVELS - 1}.")
    if target.uniform and level >= len(rungs):
        raise UsageError(
            f"{target.name} has one scheme for all modules, so there are --quality 0 to {len(rungs) - 1} "
            f"and not {level}; take --to compressed-tensors for more."
        )


def rung_of_level(level: int, priority: int | None) -> int:
    """The rung of a quality level for a class of matrices (None: not one that the table lists).

    Levels 0 and 1 are the first two rungs for all; from there on each level lifts one more class.
    """
    if level < 2:
        return level
    return 2 if priority is not None and priority < level - 1 else 1


def preferred(rungs: Rungs, rung: int) -> list[Scheme]:
    """Schemes to try for a matrix that shall stand on a rung: what isn't legal falls to the next lower
    rung, or to a higher one where no lower is legal.
    """
    order = [*range(rung, -1, -1), *range(rung + 1, len(rungs))]
    return list(dict.fromkeys(scheme for place in order for scheme in rungs[place]))


def steps(
    sizes: Sequence[Sequence[int]],
    priorities: Sequence[int | None],
    units: Iterable[Sequence[int]],
) -> list[Step]:
    """All steps in the order of their gain for each byte.

    `sizes` holds for each rung the bytes of each group, `priorities` the place of each group's class;
    `units` are groups that can go up together only. Classes that a table doesn't list (experts, of
    which a token meets few) come after all rungs of the others. Within a class the blocks are taken
    in an order that spreads any first few of them evenly.
    """
    classes: dict[tuple[bool, int, int], list[Step]] = {}
    for unit in units:
        places = [place for group in unit if (place := priorities[group]) is not None]
        for rung, (below, above) in enumerate(pairwise(sizes), 1):
            growth = sum(above[group] - below[group] for group in unit)
            if growth:
                key = (not places, rung, min(places, default=0))
                classes.setdefault(key, []).append(Step(unit, rung, growth))
    found: list[Step] = []
    for key in sorted(classes):
        spread = sorted(enumerate(classes[key]), key=lambda item: item[0] * _GOLDEN % 1)
        found += [step for _, step in spread]
    return found
