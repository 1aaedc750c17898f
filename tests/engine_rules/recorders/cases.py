"""Random names, entries and configurations, the same in every run.

The recorders put them to the engines' own code and write down the answers; the tests
put them to ours.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.engine_rules.recorders.checkpoints import checkpoint
from tests.engine_rules.recorders.tiny import CONFIGS

SEED = 20
CONFIGURATIONS = 8  # of each method and model class
METHODS = ("compressed-tensors", "awq", "fp8", "gptq")
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}


@dataclass(frozen=True)
class Case:
    """A model class with a quantization_config; `quantized` are modules that hold codes."""

    model_class: str
    method: str
    config: dict[str, Any]
    quantized: tuple[str, ...]

    @property
    def key(self) -> str:
        """For messages."""
        return f"{self.model_class} {self.method}"


def fused_name(name: str) -> str:
    """What engines may call the layer that the module becomes a part of."""
    parent, _, leaf = name.rpartition(".")
    if ".experts." in name:
        return name.partition(".experts.")[0] + ".experts"
    return f"{parent}.{FUSED.get(leaf, leaf)}" if parent else leaf


def _spellings(name: str, rng: random.Random) -> list[str]:
    """Entries that a person or a program may write for a module."""
    parts = fused_name(name).split(".")
    short = ".".join(name.split(".")[-2:])
    return [
        name,
        name,
        fused_name(name),
        fused_name(name),
        short,
        parts[-1],
        ".".join(parts[:-1]) or parts[-1],
        name.replace("model.language_model.", rng.choice(["model.", "language_model.model."])),
        name.replace("model.visual.", "visual."),
        name.removeprefix("model."),
    ]


def _regexes(name: str) -> list[str]:
    fused, leaf = fused_name(name), name.rpartition(".")[2]
    tail = re.escape(".".join(name.split(".")[-2:]))
    return [
        f".*{tail}$",
        f".*{re.escape(fused.rpartition('.')[2])}$",
        f".*({re.escape(leaf)}|{re.escape(fused.rpartition('.')[2])})$",
        f"{re.escape(name)}$",
        r".*layers\.0\..*",
        r"model\.layers\.1\.",
        r".*(self_attn|linear_attn)\..*",
        r".*mlp\.experts.*",
        r".*visual.*",
        r".*lm_head$",
        r"^mtp.*",
        # vLLM renames ".gate_proj." in Mixtral's plain entries, and must leave this one alone.
        r".*experts.0.gate_proj.?$",
    ]


def _entries(names: Sequence[str], rng: random.Random, count: int, *, regex: bool) -> list[str]:
    """Entries for some modules; of a fused layer often for all its parts, so that not all clash."""
    entries: list[str] = []
    for name in rng.sample(names, min(count, len(names))):
        if regex and rng.random() < 0.4:
            entries.append("re:" + rng.choice(_regexes(name)))
            continue
        together = [n for n in names if fused_name(n) == fused_name(name)]
        style = rng.randrange(10)
        chosen = together if rng.random() < 0.7 else [name]
        entries += [_spellings(n, rng)[style] for n in chosen]
    return list(dict.fromkeys(entries))


def _compressed(names: Sequence[str], rng: random.Random) -> dict[str, Any]:
    def group(targets: list[str], size: int) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": size,
            "dynamic": False,
        }
        return {"targets": targets, "weights": weights, "format": "pack-quantized"}

    groups = {"group_0": group(["Linear"], 128)}
    if rng.random() < 0.6:
        targets = _entries(names, rng, rng.randrange(1, 4), regex=True)
        again = ["Linear"] if rng.random() < 0.15 else []  # the group that is named last wins
        groups["group_1"] = group([*targets, *again], 32)
    if rng.random() < 0.15:
        groups["group_0"]["targets"] = ["re:.*(proj|fc1|fc2|qkvz|ba)$"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _entries(names, rng, rng.randrange(0, 7), regex=True),
    }


def _listed(method: str, names: Sequence[str], rng: random.Random) -> dict[str, Any]:
    entries = _entries(names, rng, rng.randrange(1, 7), regex=False)
    if method == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": entries,
        }
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": entries,
    }


def _gptq(names: Sequence[str], rng: random.Random) -> dict[str, Any]:
    dynamic: dict[str, Any] = {}
    for name in rng.sample(names, rng.randrange(0, min(4, len(names)))):
        pattern = rng.choice(_regexes(name))
        if rng.random() < 0.7:
            dynamic[f"-:{pattern}"] = {}
        else:
            dynamic[f"+:{pattern}"] = {"bits": 8}
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": rng.random() < 0.2,
        "dynamic": dynamic,
    }


def cases() -> Iterator[Case]:
    """All configurations, in a fixed order."""
    rng = random.Random(SEED)
    for model_class in CONFIGS:
        names = list(checkpoint(model_class))
        for method in METHODS:
            for _ in range(CONFIGURATIONS):
                left_out = {fused_name(n) for n in rng.sample(names, rng.randrange(0, 4))}
                quantized = tuple(n for n in names if fused_name(n) not in left_out)
                if method == "compressed-tensors":
                    config = _compressed(names, rng)
                elif method == "gptq":
                    config = _gptq(names, rng)
                else:
                    config = _listed(method, names, rng)
                yield Case(model_class, method, config, quantized)
