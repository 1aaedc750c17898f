"""Parameters of vision towers and their projectors."""

from __future__ import annotations

from gguf2st.verification.expected.base import Builder, FieldError, Part


def qwen_vision(b: Builder, prefix: str = "model.visual.") -> None:
    """models/qwen3_vl/modeling_qwen3_vl.py, which Qwen3.5 shares."""
    b.part = Part.VISION
    hidden, width = b.size("hidden_size"), b.size("intermediate_size")
    patch, merge = b.size("patch_size"), b.size("spatial_merge_size", 2)
    frames, channels = b.size("temporal_patch_size", 2), b.size("in_channels", 3)
    joined, out = hidden * merge * merge, b.size("out_hidden_size")
    b.add(f"{prefix}patch_embed.proj.weight", hidden, channels, frames, patch, patch)
    b.add(f"{prefix}patch_embed.proj.bias", hidden)
    b.add(f"{prefix}pos_embed.weight", b.size("num_position_embeddings"), hidden)
    for number in range(b.size("depth", most="layers")):
        block = f"{prefix}blocks.{number}."
        b.norm(f"{block}norm1", hidden, bias=True)
        b.norm(f"{block}norm2", hidden, bias=True)
        b.linear(f"{block}attn.qkv", 3 * hidden, hidden, bias=True)
        b.linear(f"{block}attn.proj", hidden, hidden, bias=True)
        b.linear(f"{block}mlp.linear_fc1", width, hidden, bias=True)
        b.linear(f"{block}mlp.linear_fc2", hidden, width, bias=True)
    mergers = [(f"{prefix}merger.", hidden)]
    levels = b.config.get("deepstack_visual_indexes") or []
    if not isinstance(levels, list):
        raise FieldError("deepstack_visual_indexes isn't a list")
    mergers += [
        (f"{prefix}deepstack_merger_list.{number}.", joined) for number in range(len(levels))
    ]
    for merger, normed in mergers:
        b.norm(f"{merger}norm", normed, bias=True)
        b.linear(f"{merger}linear_fc1", joined, joined, bias=True)
        b.linear(f"{merger}linear_fc2", out, joined, bias=True)


def siglip(b: Builder, text_hidden: int, prefix: str = "") -> None:
    """models/siglip/modeling_siglip.py, and Gemma3MultiModalProjector of models/gemma3."""
    b.part = Part.VISION
    hidden, width, patch = b.size("hidden_size"), b.size("intermediate_size"), b.size("patch_size")
    tower = f"{prefix}vision_tower.vision_model."
    b.add(
        f"{tower}embeddings.patch_embedding.weight", hidden, b.size("num_channels", 3), patch, patch
    )
    b.add(f"{tower}embeddings.patch_embedding.bias", hidden)
    side = b.size("image_size") // max(1, patch)
    b.add(f"{tower}embeddings.position_embedding.weight", side * side, hidden)
    for number in range(b.size("num_hidden_layers", most="layers")):
        block = f"{tower}encoder.layers.{number}."
        b.norm(f"{block}layer_norm1", hidden, bias=True)
        b.norm(f"{block}layer_norm2", hidden, bias=True)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            b.linear(f"{block}self_attn.{name}", hidden, hidden, bias=True)
        b.linear(f"{block}mlp.fc1", width, hidden, bias=True)
        b.linear(f"{block}mlp.fc2", hidden, width, bias=True)
    b.norm(f"{tower}post_layernorm", hidden, bias=True)
    projector = f"{prefix}multi_modal_projector."
    b.add(f"{projector}mm_input_projection_weight", hidden, text_hidden)
    b.norm(f"{projector}mm_soft_emb_norm", hidden)
