"""Module names of models, split into quantized and unquantized ones, and how engines join them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Some of twelve: 1 begins 10 and 11, and every fourth block differs in some models.
LAYERS = (0, 1, 2, 3, 10, 11)
QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
GATE_UP = {"gate_up_proj": ["gate_proj", "up_proj"]}
DELTA = {
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
}


@dataclass
class Model:
    """`vllm` and `sglang` are packed_modules_mapping of the model class there."""

    quantized: list[str]
    unquantized: list[str]
    vllm: dict[str, list[str]]
    sglang: dict[str, list[str]]
    vllm_prefixes: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [*self.quantized, *self.unquantized]


def split(names: list[str], keep: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    return [n for n in names if not keep(n)], [n for n in names if keep(n)]


def attention(block: str) -> list[str]:
    return [f"{block}.self_attn.{leaf}_proj" for leaf in "qkvo"]


def delta(block: str) -> list[str]:
    leaves = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    return [f"{block}.linear_attn.{leaf}" for leaf in leaves]


def mlp(block: str, name: str = "mlp") -> list[str]:
    return [f"{block}.{name}.{leaf}_proj" for leaf in ("gate", "up", "down")]


def experts(block: str) -> list[str]:
    each = [n for e in (0, 1, 10) for n in mlp(block, f"mlp.experts.{e}")]
    return [f"{block}.mlp.gate", *each]


def qwen3(keep: Callable[[str], bool]) -> Model:
    names = ["model.embed_tokens", "lm_head"]
    for layer in LAYERS:
        names += attention(f"model.layers.{layer}") + mlp(f"model.layers.{layer}")
    joined = QKV | GATE_UP
    return Model(*split(names, lambda n: _never(n) or keep(n)), joined, {})


def qwen3_moe(keep: Callable[[str], bool]) -> Model:
    """The first block is dense, its router missing: `mlp.gate` is part of `mlp.gate_proj` there."""
    names = ["model.embed_tokens", "lm_head"]
    for layer in LAYERS:
        block = f"model.layers.{layer}"
        names += attention(block) + (experts(block) if layer else mlp(block))
    return Model(*split(names, lambda n: _never(n) or keep(n)), QKV, QKV | GATE_UP)


def qwen35(keep: Callable[[str], bool], *, moe: bool) -> Model:
    prefix = "model.language_model"
    names = [f"{prefix}.embed_tokens", "lm_head", "mtp.fc"]
    for layer in LAYERS:
        block = f"{prefix}.layers.{layer}"
        names += attention(block) if layer % 4 == 3 else delta(block)
        if moe:
            names += [*experts(block), *mlp(block, "mlp.shared_expert")]
            names += [f"{block}.mlp.shared_expert_gate"]
        else:
            names += mlp(block)
    names += attention("mtp.layers.0") + (experts("mtp.layers.0") if moe else mlp("mtp.layers.0"))
    for layer in range(2):
        block = f"model.visual.blocks.{layer}"
        names += [f"{block}.attn.qkv", f"{block}.attn.proj"]
        names += [f"{block}.mlp.linear_fc1", f"{block}.mlp.linear_fc2"]
    names += ["model.visual.merger.linear_fc1", "model.visual.merger.linear_fc2"]
    names += ["model.visual.pos_embed"]
    joined = QKV | GATE_UP | DELTA
    prefixes = {
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
    }
    split_names = split(names, lambda n: _never(n) or keep(n))
    return Model(*split_names, joined | {"qkv": ["qkv"]}, joined, prefixes)


def _never(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return (
        leaf in ("embed_tokens", "lm_head", "gate", "shared_expert_gate", "in_proj_a", "in_proj_b")
        or "visual." in name
        or name.startswith("mtp.")
    )


def nothing(name: str) -> bool:
    return False


def ends(name: str) -> bool:
    """First and last blocks, as recipes like to keep them."""
    return ".layers.0." in name or ".layers.11." in name


def attention_only(name: str) -> bool:
    return "_attn." in name


def experts_of_some(name: str) -> bool:
    return ".experts." in name and (".layers.1." in name or ".layers.10." in name)


MODELS = {
    "qwen3": qwen3(nothing),
    "qwen3, attention kept": qwen3(attention_only),
    "qwen3, ends kept": qwen3(ends),
    "qwen3_moe": qwen3_moe(nothing),
    "qwen3_moe, some experts kept": qwen3_moe(experts_of_some),
    "qwen3_moe, ends kept": qwen3_moe(ends),
    "qwen3_5": qwen35(nothing, moe=False),
    "qwen3_5, ends kept": qwen35(ends, moe=False),
    "qwen3_5, attention kept": qwen35(attention_only, moe=False),
    "qwen3_5_moe": qwen35(nothing, moe=True),
    "qwen3_5_moe, some experts kept": qwen35(experts_of_some, moe=True),
}
