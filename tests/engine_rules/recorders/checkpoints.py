"""The linear layers in a checkpoint of each tiny model: name without leaf -> (out, in).

These are the names that the mapping tables produce, written down once more by hand.
"""

from __future__ import annotations

from typing import Any

from tests.engine_rules.recorders.tiny import CONFIGS

Shapes = dict[str, tuple[int, int]]
# Where the language model's layers are, if not at "model.".
PREFIXES = {
    "Gemma3ForConditionalGeneration": "language_model.model.",
    **{
        name: "model.language_model."
        for name in CONFIGS
        if "Qwen" in name and "ConditionalGeneration" in name
    },
}


def checkpoint(model_class: str, *, drafter: bool = False) -> Shapes:
    """All linear layers, the MTP block's alone with `drafter`."""
    config = CONFIGS[model_class]
    text = config.get("text_config", config)
    shapes: Shapes = {}
    if drafter:
        hidden = text["hidden_size"]
        shapes["mtp.fc"] = (hidden, 2 * hidden)
        return shapes | _block("mtp.layers.0.", text, "full_attention", model_class)
    prefix = PREFIXES.get(model_class, "model.")
    for layer in range(text["num_hidden_layers"]):
        kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
        shapes |= _block(f"{prefix}layers.{layer}.", text, kinds[layer], model_class)
    if "vision_config" in config:
        shapes |= _vision(config["vision_config"])
    if model_class != "Gemma2ForCausalLM":
        shapes["lm_head"] = (text["vocab_size"], text["hidden_size"])
    return shapes


def _block(at: str, text: dict[str, Any], kind: str, model_class: str) -> Shapes:
    hidden, head = text["hidden_size"], text["head_dim"]
    shapes: Shapes = {}
    if kind == "linear_attention":
        key = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        heads = text["linear_num_value_heads"]
        value = heads * text["linear_value_head_dim"]
        own = f"{at}linear_attn."
        if "Next" in model_class:
            shapes[f"{own}in_proj_qkvz"] = (2 * key + 2 * value, hidden)
            shapes[f"{own}in_proj_ba"] = (2 * heads, hidden)
        else:
            shapes[f"{own}in_proj_qkv"] = (2 * key + value, hidden)
            shapes[f"{own}in_proj_z"] = (value, hidden)
            shapes[f"{own}in_proj_b"] = (heads, hidden)
            shapes[f"{own}in_proj_a"] = (heads, hidden)
        shapes[f"{own}out_proj"] = (hidden, value)
    else:
        query = text["num_attention_heads"] * head
        gated = 2 if "Next" in model_class or "3_5" in model_class else 1
        keys = text["num_key_value_heads"] * head
        own = f"{at}self_attn."
        shapes[f"{own}q_proj"] = (query * gated, hidden)
        shapes[f"{own}k_proj"] = (keys, hidden)
        shapes[f"{own}v_proj"] = (keys, hidden)
        shapes[f"{own}o_proj"] = (hidden, query)
    return shapes | _feed_forward(at, text)


def _feed_forward(at: str, text: dict[str, Any]) -> Shapes:
    hidden = text["hidden_size"]
    if "num_local_experts" in text:
        inner, own, names = text["intermediate_size"], f"{at}block_sparse_moe.", ("w1", "w3", "w2")
        experts = text["num_local_experts"]
    elif "num_experts" in text:
        inner, own = text["moe_intermediate_size"], f"{at}mlp."
        names, experts = ("gate_proj", "up_proj", "down_proj"), text["num_experts"]
    else:
        inner, own = text["intermediate_size"], f"{at}mlp."
        return {
            f"{own}gate_proj": (inner, hidden),
            f"{own}up_proj": (inner, hidden),
            f"{own}down_proj": (hidden, inner),
        }
    shapes: Shapes = {f"{own}gate": (experts, hidden)}
    for expert in range(experts):
        for name, shape in zip(names, [(inner, hidden)] * 2 + [(hidden, inner)], strict=True):
            shapes[f"{own}experts.{expert}.{name}"] = shape
    if shared := text.get("shared_expert_intermediate_size"):
        shapes[f"{own}shared_expert_gate"] = (1, hidden)
        shapes[f"{own}shared_expert.gate_proj"] = (shared, hidden)
        shapes[f"{own}shared_expert.up_proj"] = (shared, hidden)
        shapes[f"{own}shared_expert.down_proj"] = (hidden, shared)
    return shapes


def _vision(vision: dict[str, Any]) -> Shapes:
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    if "depth" not in vision:
        own = "vision_tower.vision_model.encoder.layers.0."
        attention = {
            f"{own}self_attn.{n}": (hidden, hidden) for n in ("q_proj", "k_proj", "v_proj")
        }
        return attention | {
            f"{own}self_attn.out_proj": (hidden, hidden),
            f"{own}mlp.fc1": (inner, hidden),
            f"{own}mlp.fc2": (hidden, inner),
        }
    own, merged = "model.visual.blocks.0.", hidden * vision["spatial_merge_size"] ** 2
    shapes = {
        f"{own}attn.qkv": (3 * hidden, hidden),
        f"{own}attn.proj": (hidden, hidden),
        f"{own}mlp.linear_fc1": (inner, hidden),
        f"{own}mlp.linear_fc2": (hidden, inner),
    }
    mergers = ["merger"] + [
        f"deepstack_merger_list.{i}" for i in range(len(vision["deepstack_visual_indexes"]))
    ]
    for name in mergers:
        shapes[f"model.visual.{name}.linear_fc1"] = (merged, merged)
        shapes[f"model.visual.{name}.linear_fc2"] = (vision["out_hidden_size"], merged)
    return shapes
