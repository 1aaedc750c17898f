"""A tiny config.json for every model class that the mapping tables can name.

Widths differ where it matters, so that a recorded layer tells what it is made of.
"""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 48}
_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_ROPE3 = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
_ROPE35 = {**_ROPE3, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_GEMMA: dict[str, Any] = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "hidden_act": "gelu_pytorch_tanh",
}
_QWEN_IDS = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}


def _text(name: str, model_type: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"architectures": [name], "model_type": model_type, "dtype": "bfloat16", **_TEXT}
    for part in (*parts, more):
        config.update(part)
    return config


def _qwen_vl(
    name: str, model_type: str, vision_type: str, deepstack: list[int], *parts: dict[str, Any]
) -> dict[str, Any]:
    text = _text(name, f"{model_type}_text", *parts)
    del text["architectures"]
    vision = {**_QWEN_VISION, "model_type": vision_type, "deepstack_visual_indexes": deepstack}
    return {
        "architectures": [name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
        **_QWEN_IDS,
    }


def _gemma3_vl() -> dict[str, Any]:
    text = _text("", "gemma3_text", _GEMMA, {"rope_parameters": _GEMMA3_ROPE})
    del text["architectures"]
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 1,
        "boi_token_index": 120,
        "eoi_token_index": 121,
        "image_token_index": 122,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _text("LlamaForCausalLM", "llama"),
    "MixtralForCausalLM": _text(
        "MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "Qwen2ForCausalLM": _text("Qwen2ForCausalLM", "qwen2"),
    "Qwen2MoeForCausalLM": _text("Qwen2MoeForCausalLM", "qwen2_moe", _EXPERTS, _SHARED),
    "Qwen3ForCausalLM": _text("Qwen3ForCausalLM", "qwen3"),
    "Qwen3MoeForCausalLM": _text("Qwen3MoeForCausalLM", "qwen3_moe", _EXPERTS),
    "Qwen3NextForCausalLM": _text("Qwen3NextForCausalLM", "qwen3_next", _EXPERTS, _SHARED, _DELTA),
    "Qwen3VLForConditionalGeneration": _qwen_vl(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        "qwen3_vl",
        [0],
        {"rope_parameters": _ROPE3, "rope_scaling": _ROPE3},
    ),
    "Qwen3VLMoeForConditionalGeneration": _qwen_vl(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        "qwen3_vl_moe",
        [0],
        {"rope_parameters": _ROPE3, "rope_scaling": _ROPE3},
        _EXPERTS,
    ),
    "Qwen3_5ForCausalLM": _text(
        "Qwen3_5ForCausalLM", "qwen3_5_text", _DELTA, {"rope_parameters": _ROPE35}
    ),
    "Qwen3_5MoeForCausalLM": _text(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _EXPERTS,
        _SHARED,
        _DELTA,
        {"rope_parameters": _ROPE35},
    ),
    "Qwen3_5ForConditionalGeneration": _qwen_vl(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        "qwen3_5_vision",
        [],
        _DELTA,
        {"rope_parameters": _ROPE35},
    ),
    "Qwen3_5MoeForConditionalGeneration": _qwen_vl(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        "qwen3_5_moe_vision",
        [],
        _EXPERTS,
        _SHARED,
        _DELTA,
        {"rope_parameters": _ROPE35},
    ),
    "Gemma2ForCausalLM": _text(
        "Gemma2ForCausalLM", "gemma2", _GEMMA, attn_logit_softcapping=50.0, tie_word_embeddings=True
    ),
    "Gemma3ForCausalLM": _text(
        "Gemma3ForCausalLM", "gemma3_text", _GEMMA, {"rope_parameters": _GEMMA3_ROPE}
    ),
    "Gemma3ForConditionalGeneration": _gemma3_vl(),
}

# Classes whose checkpoints may hold an MTP block, which is loaded by a class of its own.
DRAFTERS = [name for name in CONFIGS if "3_5" in name or "Next" in name]
for _name in DRAFTERS:
    CONFIGS[_name].get("text_config", CONFIGS[_name])["mtp_num_hidden_layers"] = 1
    CONFIGS[_name].get("text_config", CONFIGS[_name])["num_nextn_predict_layers"] = 1
