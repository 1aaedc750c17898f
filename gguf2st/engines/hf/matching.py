"""What transformers 5.19 and compressed-tensors make of a quantization_config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gguf2st.engines.patterns import REGEX, compiled


def name_matches(name: str, target: str) -> bool:
    """compressed_tensors/utils/match.py match_name: the whole name, or a regex at its start."""
    if target.startswith(REGEX):
        return compiled(target[len(REGEX) :]).match(name) is not None
    return target == name


def _matches(name: str, classes: Sequence[str], target: str) -> bool:
    return name_matches(name, target) or target in classes


def matched_target(
    name: str, classes: Sequence[str], targets: Sequence[str], ignore: Sequence[str]
) -> str | None:
    """compressed_tensors apply_quantization_config with match_targets; None: not quantized.

    `classes` are the module's class and its bases. Names come before regexes, those
    before classes, and each kind is sorted by name, whatever the order in the config.
    """
    if any(_matches(name, classes, entry) for entry in ignore):
        return None
    ordered = sorted(targets, key=lambda target: (REGEX in target, target))
    by_name = [target for target in ordered if name_matches(name, target)]
    by_class = [target for target in ordered if target in classes]
    return next(iter(by_name + by_class), None)


def experts_group(groups: Mapping[str, Any]) -> str:
    """transformers/integrations/compressed_tensors.py get_experts_scheme.

    One group for the experts of the whole model, whatever is ignored: the first with a
    regex that mentions experts, else the first with a target that is no regex.
    """
    for name, group in groups.items():
        if any(t.startswith(REGEX) and "experts" in t for t in group["targets"]):
            return name
    for name, group in groups.items():
        if any(not t.startswith(REGEX) for t in group["targets"]):
            return name
    return next(iter(groups))


def converted(name: str, patterns: Sequence[str] | None) -> bool:
    """transformers/quantizers/quantizers_utils.py should_convert_module (AWQ, fp8).

    Entries are regexes matched at the start of the name, without a boundary at their end
    ("model.layers.1" also excepts layer 10), or plain ends of the name.
    """
    if patterns is None:
        return True
    return not any(compiled(p).match(name) or name.endswith(p) for p in patterns)
