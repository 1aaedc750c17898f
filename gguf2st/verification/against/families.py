"""What llama.cpp's converter makes of each family's tensors: Hugging Face name -> GGUF name.

Written from its own sources, conversion/*.py and gguf-py's tensor_mapping.py, and from nothing
else: a mistake in the mapping tables that gguf2st converts with must not be here as well.
A name within a layer gives the one within a block, or a function that says how its rows are
divided and ordered. Names without a suffix stand for .weight and .bias; `*` is an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gguf2st.verification.against.places import (
    Part,
    SizeError,
    Sizes,
    Split,
    rotary_pairs,
    tiled_heads,
)

Table = Mapping[str, str | Split]


def _rotary_queries(sizes: Sizes, rows: int, _: int) -> list[Part]:
    return [Part("attn_q", rotary_pairs(sizes["num_attention_heads"], rows))]


def _rotary_keys(sizes: Sizes, rows: int, _: int) -> list[Part]:
    return [Part("attn_k", rotary_pairs(sizes.kv_heads, rows))]


def _tiled(stem: str, width: str = "") -> Split:
    """Rows of value heads, each `width` (a key of config.json) high, or of one row."""

    def split(sizes: Sizes, rows: int, columns: int) -> list[Part]:
        return [Part(stem, tiled_heads(sizes, sizes[width] if width else 1, rows))]

    return split


def _tiled_columns(sizes: Sizes, rows: int, columns: int) -> list[Part]:
    order = tiled_heads(sizes, sizes["linear_value_head_dim"], columns)
    return [Part("ssm_out", columns=order)]


def _by_kind(sizes: Sizes, rows: int, columns: int) -> list[Part]:
    """Qwen3NextModel.modify_tensors: [q k v z] of each key head -> all q, all k, all v; all z."""
    keys, per = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    key, value = sizes["linear_key_head_dim"], per * sizes["linear_value_head_dim"] // keys
    if rows != keys * 2 * (key + value):
        raise SizeError(f"the heads of config.json don't fit the {rows} rows of in_proj_qkvz")
    head = np.arange(rows).reshape(keys, -1)
    parts = np.split(head, np.cumsum([key, key, value]), axis=1)
    joined = np.concatenate([part.reshape(-1) for part in parts[:3]])
    return [Part("attn_qkv", joined), Part("attn_gate", parts[3].reshape(-1))]


def _halves(sizes: Sizes, rows: int, columns: int) -> list[Part]:
    """Qwen2MoeModel.modify_tensors: gate above up."""
    numbers = np.arange(rows)
    return [Part("ffn_gate_exps", numbers[: rows // 2]), Part("ffn_up_exps", numbers[rows // 2 :])]


def _alternating(sizes: Sizes, rows: int, columns: int) -> list[Part]:
    """GptOssModel.modify_tensors: rows of gate and up take turns."""
    numbers = np.arange(rows)
    return [Part("ffn_gate_exps", numbers[::2]), Part("ffn_up_exps", numbers[1::2])]


def _alternating_biases(sizes: Sizes, rows: int, columns: int) -> list[Part]:
    numbers = np.arange(columns)
    return [
        Part("ffn_gate_exps.bias", columns=numbers[::2]),
        Part("ffn_up_exps.bias", columns=numbers[1::2]),
    ]


def _frames(sizes: Sizes, rows: int, columns: int) -> list[Part]:
    """Qwen3VLVisionModel.modify_tensors: the convolution over two frames, one tensor for each."""
    pixels = np.arange(columns).reshape(3, 2, -1)
    return [
        Part("v.patch_embd.weight", columns=pixels[:, 0].reshape(-1)),
        Part("v.patch_embd.weight.1", columns=pixels[:, 1].reshape(-1)),
    ]


# Names outside of layers.
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
ATTENTION: Table = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
}
FEED_FORWARD: Table = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERTS: Table = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": _halves,
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
MIXTRAL: Table = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
}
# Both kinds of delta net. A_log and dt_bias lose and change their suffix.
DELTA_NET: Table = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkvz": _by_kind,
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
TILED_DELTA_NET: Table = {
    "linear_attn.in_proj_qkv": _tiled("attn_qkv", "linear_value_head_dim"),
    "linear_attn.in_proj_z": _tiled("attn_gate", "linear_value_head_dim"),
    "linear_attn.in_proj_a": _tiled("ssm_alpha"),
    "linear_attn.in_proj_b": _tiled("ssm_beta"),
    "linear_attn.conv1d": _tiled("ssm_conv1d", "linear_value_head_dim"),
    "linear_attn.out_proj": _tiled_columns,
    "linear_attn.A_log": _tiled("ssm_a"),
    "linear_attn.dt_bias": _tiled("ssm_dt.bias"),
}
# _QwenMtpMixin.filter_tensors (qwen.py), into the first block behind the trunk.
MTP = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}
GEMMA: Table = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT_OSS: Table = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": _alternating,
    "mlp.experts.gate_up_proj_bias": _alternating_biases,
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}


@dataclass(frozen=True)
class Family:
    """Architectures that are converted alike; `layer` is their table.

    `shifted`: 1 is added to norms. `transposed`: unquantized stacks of experts lie (in, out) in
    the checkpoint. `before_mlp` is the norm before the feed-forward.
    """

    architectures: tuple[str, ...]
    layer: Table
    shifted: bool = False
    transposed: bool = False
    before_mlp: str = "ffn_norm"


FAMILIES = (
    Family(  # llama.py, LlamaModel
        ("llama",),
        {
            **ATTENTION,
            "self_attn.q_proj": _rotary_queries,
            "self_attn.k_proj": _rotary_keys,
            **FEED_FORWARD,
            **MIXTRAL,
        },
    ),
    Family(("qwen2", "qwen3", "qwen3vl"), {**ATTENTION, **FEED_FORWARD}),  # qwen.py, qwen3vl.py
    Family(("qwen2moe", "qwen3moe"), {**ATTENTION, **FEED_FORWARD, **EXPERTS}),
    Family(("qwen3vlmoe",), {**ATTENTION, **FEED_FORWARD, **EXPERTS}, transposed=True),
    Family(  # qwen.py, Qwen3NextModel
        ("qwen3next",),
        {**ATTENTION, **FEED_FORWARD, **EXPERTS, **DELTA_NET},
        shifted=True,
        before_mlp="post_attention_norm",
    ),
    Family(  # qwen.py, _LinearAttentionVReorderBase
        ("qwen35", "qwen35moe"),
        {**ATTENTION, **FEED_FORWARD, **EXPERTS, **DELTA_NET, **TILED_DELTA_NET},
        shifted=True,
        before_mlp="post_attention_norm",
    ),
    Family(  # gemma.py, Gemma2Model and Gemma3Model
        ("gemma2", "gemma3"), {**ATTENTION, **FEED_FORWARD, **GEMMA}, shifted=True
    ),
    Family(  # gpt_oss.py
        ("gpt-oss",),
        {**ATTENTION, **GPT_OSS},
        transposed=True,
        before_mlp="post_attention_norm",
    ),
)


@dataclass(frozen=True)
class Tower:
    """A vision tower and its projector; `layers` is what its layers' names begin with."""

    projector: str
    prefixes: tuple[str, ...]
    layers: str
    outside: Table
    layer: Table
    deepstack: Table = field(default_factory=dict)
    shifted: tuple[str, ...] = ()


TOWERS = (
    Tower(  # qwen3vl.py, Qwen3VLVisionModel
        "qwen3vl_merger",
        ("visual.",),
        "visual.blocks.",
        {
            "visual.patch_embed.proj.weight": _frames,
            "visual.patch_embed.proj.bias": "v.patch_embd.bias",
            "visual.pos_embed": "v.position_embd",
            "visual.merger.norm": "v.post_ln",
            "visual.merger.linear_fc1": "mm.0",
            "visual.merger.linear_fc2": "mm.2",
        },
        {
            "attn.qkv": "attn_qkv",
            "attn.proj": "attn_out",
            "mlp.linear_fc1": "ffn_up",
            "mlp.linear_fc2": "ffn_down",
            "norm1": "ln1",
            "norm2": "ln2",
        },
        {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"},
    ),
    Tower(  # gemma.py, Gemma3VisionModel
        "gemma3",
        ("vision_tower.", "multi_modal_projector."),
        "vision_tower.vision_model.encoder.layers.",
        {
            "vision_tower.vision_model.embeddings.patch_embedding": "v.patch_embd",
            "vision_tower.vision_model.embeddings.position_embedding": "v.position_embd",
            "vision_tower.vision_model.post_layernorm": "v.post_ln",
            "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
            "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
        },
        {
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.out_proj": "attn_out",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
            "layer_norm1": "ln1",
            "layer_norm2": "ln2",
        },
        shifted=("mm.soft_emb_norm",),
    ),
)


def family_of(architecture: str) -> Family | None:
    """The family of a GGUF's `general.architecture`."""
    return next((f for f in FAMILIES if architecture in f.architectures), None)


def tower_of(projector: str) -> Tower | None:
    """The tower of a GGUF's `clip.projector_type`."""
    return next((t for t in TOWERS if t.projector == projector), None)
