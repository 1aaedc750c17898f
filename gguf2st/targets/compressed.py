"""`quantization_config` of the compressed-tensors formats.

Keys and values follow compressed_tensors' quantization/quant_config.py, quant_scheme.py
and quant_args.py, where unknown keys are errors: `scale_dtype` and `zp_dtype` are left
out where older readers don't know them. How engines match `ignore` and `targets`: vLLM's
and SGLang's quantization/compressed_tensors/utils.py, compressed_tensors' utils/match.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gguf2st.errors import VerificationError
from gguf2st.targets.base import Quantized, Scheme
from gguf2st.targets.names import (
    Cover,
    check_undivided,
    cover,
    engine_names,
    expressions,
    is_expert,
    joined,
    representatives,
)

Arguments = dict[str, Any]
# Integers; also what a mix of formats calls itself.
PACKED = "pack-quantized"


def arguments(kind: str, bits: int, strategy: str, **others: Any) -> Arguments:
    """`QuantizationArgs` of static symmetric weights; `others` replaces or adds keys."""
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    } | others


def token_activations(kind: str) -> Arguments:
    """`QuantizationArgs` of activations that are quantized while serving, one scale for each token."""
    return arguments(kind, 8, "token", dynamic=True, observer=None)


def configuration(
    storage: str | Callable[[Scheme], str],
    quantized: Sequence[Quantized],
    unquantized: Sequence[str],
    weights: Callable[[Scheme], Arguments],
    activations: Arguments | None = None,
) -> dict[str, Any]:
    """The configuration of a checkpoint whose modules are stored as `storage` says, of each scheme or of all.

    `weights` describes the weights of a scheme. Raises `VerificationError` when a
    target or an ignored name would hit a module that it mustn't.
    """
    groups: dict[Scheme, list[str]] = {}
    for module in quantized:
        groups.setdefault(module.scheme, []).append(module.name)
    # The first group is targeted by class, which engines try last (vLLM) or before joined
    # names (SGLang): all others need names, so the largest comes first.
    order = sorted(groups, key=lambda scheme: -len(groups[scheme]))
    named, ignore = entries([groups[scheme] for scheme in order], unquantized)
    formats = [storage if isinstance(storage, str) else storage(scheme) for scheme in order]
    return {
        "quant_method": "compressed-tensors",
        # SGLang refuses int4 experts under any other top-level format than theirs.
        "format": PACKED if PACKED in formats else formats[0],
        # transformers builds modules for packed tensors only then.
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{number}": {
                "targets": targets,
                # vLLM looks for int4 experts' format here and not at the top level.
                "format": form,
                "input_activations": activations,
                "output_activations": None,
                "weights": weights(scheme),
            }
            for number, (scheme, targets, form) in enumerate(
                zip(order, named, formats, strict=True)
            )
        },
        "ignore": ignore,
    }


def entries(
    groups: Sequence[Sequence[str]], unquantized: Sequence[str]
) -> tuple[list[list[str]], list[str]]:
    """Targets of each group of modules, the first by class and the others by names, and `ignore`.

    Raises `VerificationError` when engines would join modules of two groups, and when a
    target or an ignored name would hit a module that it mustn't.
    """
    check_undivided([*groups, unquantized])
    quantized = [name for group in groups for name in group]
    others = [[n for o in groups if o is not group for n in o] for group in groups]
    named = [_targets(group, rest) for group, rest in zip(groups, others, strict=True)]
    named[0] = ["Linear", *_heads(groups[0])]
    ignore = _ignored(unquantized, quantized)
    for number, (targets, rest) in enumerate(zip(named, others, strict=True)):
        _check(f"targets of group {number}", targets, rest)
    _check("ignore", ignore, quantized)
    return named, ignore


def _targets(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Entries that hit modules under all their names; joined ones too, as SGLang tries the class first."""
    return _entries(cover(names, others))


def _heads(names: Iterable[str]) -> list[str]:
    """A quantized output head must be named: its class isn't "Linear" in vLLM and SGLang."""
    return ["re:.*lm_head$"] if any(name.endswith("lm_head") for name in names) else []


def _ignored(names: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """Every name, and expressions for what engines call it.

    vLLM translates names but not expressions to its own; SGLang and vLLM test only the
    joined name where a model class doesn't list its parts; experts are one module.
    """
    alone = representatives(names)
    found = cover(names, quantized)
    # Names of 256 experts in each of 60 blocks would bury all others; an expression hits them.
    hit = [name for name in alone if not is_expert(name) or name in found.rest]
    return [*dict.fromkeys([*hit, *joined(hit)]), *_entries(replace(found, rest=()))]


def _entries(found: Cover) -> list[str]:
    return [*(f"re:{expression}" for expression in expressions(found.candidates)), *found.rest]


def _check(what: str, entries: Sequence[str], forbidden: Iterable[str]) -> None:
    """What is written decides what is said: no entry may hit a module that is written otherwise."""
    patterns = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    plain = {entry for entry in entries if not entry.startswith("re:")}
    for name in engine_names(forbidden):
        # SGLang takes a plain name for the end of a name, too.
        ends = {name.split(".", cut)[-1] for cut in range(name.count(".") + 1)}
        if ends & plain or any(pattern.match(name) for pattern in patterns):
            raise VerificationError(f"an entry of {what} hits {name}; please report this.")
