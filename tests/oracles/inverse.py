"""The checkpoint behind a GGUF, found a second way.

Written from llama.cpp's converter (conversion/*.py, gguf-py's tensor_mapping.py) alone: gguf-py
reads the file, gguf-py or ggml decodes the blocks, and each step of the converter is undone on
whole float32 tensors. Where the converter reorders rows, its own expression is applied to row
numbers, and the permutation that comes out is inverted.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.oracles import ggml

Tensors = dict[str, torch.Tensor]

# qwen.py, _reorder_v_heads: only these architectures store the value heads in tiled order.
TILED_VALUE_HEADS = ("qwen35", "qwen35moe")
# modify_tensors of these adds 1 to every norm but `linear_attn.norm` (qwen.py, gemma.py).
SHIFTED_NORMS = ("qwen35", "qwen35moe", "qwen3next", "gemma2", "gemma3")
# Hugging Face prefix of the decoder in a checkpoint with a vision tower; "model." without one.
MULTIMODAL_ROOTS = {
    "qwen35": "model.language_model.",
    "qwen35moe": "model.language_model.",
    "qwen3vl": "model.language_model.",
    "qwen3vlmoe": "model.language_model.",
    "gemma3": "language_model.model.",
}

# Name within a block -> name within a layer (gguf-py's tensor_mapping.py).
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
}
GEMMA_LAYER = LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GPT_OSS_LAYER = LAYER | {"ffn_gate_inp": "mlp.router"}
MTP = {  # qwen.py, _QwenMtpMixin.filter_tensors
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
QWEN_VISION = {  # qwen3vl.py, Qwen3VLVisionModel.modify_tensors
    "v.position_embd": "pos_embed",
    "v.patch_embd": "patch_embed.proj",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
    "ln1": "norm1",
    "ln2": "norm2",
    "fc1": "linear_fc1",
    "fc2": "linear_fc2",
    "norm": "norm",
}
GEMMA_VISION = {  # gemma.py, Gemma3VisionModel
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
}


def checkpoint(model: Path, mmproj: Path | None = None, mtp: Path | None = None) -> Tensors:
    """Hugging Face name -> float32 tensor, as they were before the converter changed them."""
    file = File(model)
    result = _language(file, File(mtp) if mtp else file, multimodal=mmproj is not None)
    if mmproj:
        projector = File(mmproj)
        vision = {"qwen3vl_merger": _qwen_vision, "gemma3": _gemma_vision}
        result |= dict(vision[projector.key("clip.projector_type")](projector))
    return result


# --- reading -------------------------------------------------------------------------------------


# The fixtures of swapped byte order hold plain numbers only.
_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class File(gguf.GGUFReader):
    """The keys of a GGUF, and the tensors of all its shards."""

    def __init__(self, path: Path):
        super().__init__(path)
        for number in range(2, self.key("split.count", 1) + 1 if "-00001-of-" in path.name else 2):
            shard = path.with_name(path.name.replace("-00001-of-", f"-{number:05}-of-"))
            self._stored |= File(shard)._stored

    def key(self, name: str, default: Any = None) -> Any:
        """A key; `{}` in its name stands for the architecture."""
        if "{}" in name:
            name = name.format(self.key("general.architecture"))
        field = self.fields.get(name)
        return default if field is None else field.contents()

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        """Called by gguf-py after the keys. Its own version stops at types it has no name for."""
        names = {0: "F32"} | {code: name for name, code in ggml.codes().items()}
        self._stored: dict[str, tuple[str, list[int], np.ndarray]] = {}
        for field in fields:
            _, _, _, dimensions, code, offset = field.parts
            shape = [int(size) for size in reversed(dimensions)]
            kind = names[int(code[0])]
            size = int(np.prod(shape)) * 4
            if kind != "F32":
                size = size // 4 // ggml.block_size(kind) * ggml.block_bytes(kind)
            raw = self._get(start_offs + int(offset[0]), np.uint8, size)
            if self.byte_order == "S":
                raw = raw.reshape(-1, _PLAIN_BYTES[kind])[:, ::-1].reshape(-1)
            self._stored[field.name] = kind, shape, raw

    @property
    def kinds(self) -> dict[str, str]:
        """Tensor name -> block type."""
        return {name: kind for name, (kind, _, _) in self._stored.items()}

    @cached_property
    def values(self) -> Tensors:
        """Tensor name -> decoded values."""
        return {
            name: torch.from_numpy(_decode(kind, raw, int(np.prod(shape)))).reshape(shape)
            for name, (kind, shape, raw) in self._stored.items()
        }


def _decode(kind: str, raw: np.ndarray, count: int) -> np.ndarray:
    if kind in ("Q1_0", "Q2_0", "NVFP4"):  # newer than gguf-py's decoders
        return ggml.dequantize(kind, raw.tobytes(), count)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).copy()


# --- the language model --------------------------------------------------------------------------


def _language(file: File, draft: File, *, multimodal: bool) -> Tensors:
    architecture = file.key("general.architecture")
    root = MULTIMODAL_ROOTS[architecture] if multimodal else "model."
    blocks = draft.key("{}.block_count")
    trunk = blocks - draft.key("{}.nextn_predict_layers", 0)

    tensors = _apply_scales(draft.values | file.values)
    tensors.pop("rope_freqs.weight", None)  # computed from config.json by the converter
    result = {
        f"{root}embed_tokens.weight": tensors.pop("token_embd.weight"),
        f"{root}norm.weight": tensors.pop("output_norm.weight"),
    }
    if "output.weight" in tensors:
        result["lm_head.weight"] = tensors.pop("output.weight")
    for number in range(blocks):
        prefix = f"blk.{number}."
        names = [name for name in tensors if name.startswith(prefix)]
        block = {name.removeprefix(prefix): tensors.pop(name) for name in names}
        for name, renamed in MTP.items():
            if f"{name}.weight" in block:
                result[f"mtp.{renamed}.weight"] = block.pop(f"{name}.weight")
        layer = f"{root}layers.{number}." if number < trunk else f"mtp.layers.{number - trunk}."
        result |= {layer + name: value for name, value in _layer(file, block, multimodal)}
    assert not tensors, f"no one knows {list(tensors)}"

    if architecture in SHIFTED_NORMS:
        for name in result:
            shifted = name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight"))
            if shifted and not name.endswith("linear_attn.norm.weight"):
                result[name] = result[name] - 1.0
    return result


def _apply_scales(tensors: Tensors) -> Tensors:
    """Multiply NVFP4 weights by their second scale (base.py, _repack_nvfp4): one, or per expert."""
    result = {n: t for n, t in tensors.items() if not n.endswith((".scale", ".input_scale"))}
    for name in tensors:
        if name.endswith(".scale"):
            weight = name.removesuffix("scale") + "weight"
            factors = tensors[name].reshape(-1, *[1] * (result[weight].ndim - 1))
            result[weight] = (result[weight] * factors).reshape(result[weight].shape)
    return result


def _layer(file: File, block: Tensors, multimodal: bool) -> Iterator[tuple[str, torch.Tensor]]:
    architecture = file.key("general.architecture")
    if "ssm_out.weight" in block:
        _undo_linear_attention(file, block)
    elif "attn_qkv.weight" in block:
        _split_qkv(file, block)
    if architecture == "llama":
        _undo_permutation(file, block)
    if "ffn_gate_inp_shexp.weight" in block:  # llama-quantize drops a leading dimension of 1
        block["ffn_gate_inp_shexp.weight"] = block["ffn_gate_inp_shexp.weight"].reshape(1, -1)
    if architecture == "gpt-oss":
        yield from _gpt_oss_experts(block)
        yield "self_attn.sinks", block.pop("attn_sinks.weight")
    else:
        yield from _experts(file, block, multimodal)
    names = GEMMA_LAYER if architecture.startswith("gemma") else LAYER
    names = GPT_OSS_LAYER if architecture == "gpt-oss" else names
    for name, value in block.items():
        stem, _, suffix = name.partition(".")
        if architecture == "llama" and stem == "ffn_gate_inp":
            yield "block_sparse_moe.gate.weight", value
        elif stem in ("ssm_a", "ssm_dt"):
            yield names[stem], value
        else:
            yield f"{names[stem]}.{suffix}", value


def _split_qkv(file: File, block: Tensors) -> None:
    """Undo --fuse-qkv (base.py, modify_tensors): q, k and v below each other."""
    key_rows = file.key("{}.attention.head_count_kv") * file.key("{}.attention.key_length")
    for suffix in ("weight", "bias"):
        fused = block.pop(f"attn_qkv.{suffix}", None)
        if fused is not None:
            rows = (len(fused) - 2 * key_rows, key_rows, key_rows)
            for name, part in zip("qkv", fused.split(rows), strict=True):
                block[f"attn_{name}.{suffix}"] = part


def _undo_permutation(file: File, block: Tensors) -> None:
    """Undo LlamaModel.permute (llama.py)."""
    for letter, key in (("q", "head_count"), ("k", "head_count_kv")):
        heads = file.key(f"{{}}.attention.{key}")
        for suffix in ("weight", "bias"):
            name = f"attn_{letter}.{suffix}"
            if name in block:
                block[name] = undo_reordering(
                    block[name],
                    lambda rows: rows.reshape(heads, 2, len(rows) // heads // 2).swapaxes(1, 2),  # noqa: B023
                )


def _undo_linear_attention(file: File, block: Tensors) -> None:
    """Undo Qwen3NextModel.modify_tensors and _LinearAttentionVReorderBase (qwen.py)."""
    key_heads, value_heads = file.key("{}.ssm.group_count"), file.key("{}.ssm.time_step_rank")
    key_dim, value_dim = file.key("{}.ssm.state_size"), file.key("{}.ssm.inner_size") // value_heads
    per_key = value_heads // key_heads
    block["ssm_a"] = torch.log(-block["ssm_a"].double()).float()

    def tile(width: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda numbers: numbers.reshape(key_heads, per_key, width).permute(1, 0, 2)

    if file.key("general.architecture") in TILED_VALUE_HEADS:
        for name in ("attn_qkv.weight", "ssm_conv1d.weight"):
            queries_keys, values = block[name].tensor_split([2 * key_heads * key_dim])
            block[name] = torch.cat([queries_keys, undo_reordering(values, tile(value_dim))])
        block["attn_gate.weight"] = undo_reordering(block["attn_gate.weight"], tile(value_dim))
        for name in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
            block[name] = undo_reordering(block[name], tile(1))
        block["ssm_out.weight"] = undo_reordering(block["ssm_out.weight"], tile(value_dim), dim=1)
    elif "attn_gate.weight" in block:  # in_proj_qkvz was taken apart

        def regroup(rows: torch.Tensor) -> torch.Tensor:
            widths = [key_dim, key_dim, per_key * value_dim, per_key * value_dim]
            parts = rows.view(key_heads, sum(widths)).split(widths, dim=-1)
            return torch.cat([part.reshape(-1) for part in parts])

        joined = torch.cat([block.pop("attn_qkv.weight"), block.pop("attn_gate.weight")])
        block["ssm_in.weight"] = undo_reordering(joined, regroup)
    block["ssm_conv1d.weight"] = block["ssm_conv1d.weight"].unsqueeze(1)


def _experts(file: File, block: Tensors, multimodal: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Take the experts' tensors out of `block` and yield them as the checkpoint stores them."""
    architecture = file.key("general.architecture")
    if "ffn_gate_up_exps.weight" in block:  # --fuse-gate-up-exps (base.py, modify_tensors)
        gate, up = block.pop("ffn_gate_up_exps.weight").chunk(2, dim=1)
        block |= {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if "ffn_gate.0.weight" in block:  # before experts were stacked
        for kind in ("gate", "up", "down"):
            names = [f"ffn_{kind}.{e}.weight" for e in range(file.key("{}.expert_count"))]
            block[f"ffn_{kind}_exps.weight"] = torch.stack([block.pop(name) for name in names])
    if "ffn_gate_exps.weight" not in block:
        return
    gate, up, down = (block.pop(f"ffn_{kind}_exps.weight") for kind in ("gate", "up", "down"))
    if architecture == "qwen35moe":  # Qwen2MoeModel.modify_tensors
        yield "mlp.experts.gate_up_proj", torch.cat([gate, up], dim=1)
        yield "mlp.experts.down_proj", down
    elif architecture == "qwen3vlmoe" and multimodal:  # Qwen3VLMoeTextModel.modify_tensors
        gate_up = torch.cat([gate.permute(0, 2, 1), up.permute(0, 2, 1)], dim=-1)
        yield "mlp.experts.gate_up_proj", gate_up
        yield "mlp.experts.down_proj", down.permute(0, 2, 1)
    else:
        mixtral = architecture == "llama"
        module = "block_sparse_moe" if mixtral else "mlp"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        for stack, name in zip((gate, up, down), names, strict=True):
            for number, expert in enumerate(stack):
                yield f"{module}.experts.{number}.{name}.weight", expert


def _gpt_oss_experts(block: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Undo GptOssModel.modify_tensors (gpt_oss.py): every second column, and transposed."""
    for ending, suffix in ("", "weight"), ("_bias", "bias"):
        gate, up, down = (block.pop(f"ffn_{kind}_exps.{suffix}") for kind in ("gate", "up", "down"))
        if suffix == "weight":
            gate, up, down = (part.transpose(-1, -2) for part in (gate, up, down))
        both = torch.empty(*gate.shape[:-1], 2 * gate.shape[-1])
        both[..., ::2], both[..., 1::2] = gate, up
        yield f"mlp.experts.gate_up_proj{ending}", both
        yield f"mlp.experts.down_proj{ending}", down


def undo_reordering(
    tensor: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor], dim: int = 0
) -> torch.Tensor:
    """Put rows (or columns) back that the converter put in the order `forward(numbers)`."""
    order = forward(torch.arange(tensor.shape[dim])).reshape(-1)
    return tensor.index_select(dim, order.argsort())


# --- vision towers -------------------------------------------------------------------------------


def _qwen_vision(file: File) -> Iterator[tuple[str, torch.Tensor]]:
    root = "model.visual."
    tensors = dict(file.values)
    slices = [tensors.pop("v.patch_embd.weight"), tensors.pop("v.patch_embd.weight.1")]
    yield f"{root}patch_embed.proj.weight", torch.stack(slices, dim=2)
    flags = file.key("clip.vision.is_deepstack_layers", [])
    mergers = [layer for layer, flag in enumerate(flags) if flag]
    for name, value in tensors.items():
        place, leaf, suffix = _vision_place(name)
        if place.startswith("v.blk."):
            place = f"blocks.{place.split('.')[2]}."
        elif place.startswith("v.deepstack."):
            place = f"deepstack_merger_list.{mergers.index(int(place.split('.')[2]))}."
        yield f"{root}{place}{QWEN_VISION[leaf]}.{suffix}", value


def _gemma_vision(file: File) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = dict(file.values)
    projector = "multi_modal_projector."
    projection = tensors.pop("mm.input_projection.weight")
    yield f"{projector}mm_input_projection_weight", projection  # filter_tensors: "_weight"
    norm = tensors.pop("mm.soft_emb_norm.weight")
    yield f"{projector}mm_soft_emb_norm.weight", norm - 1.0
    for name, value in tensors.items():
        place, leaf, suffix = _vision_place(name)
        if place:
            place = f"encoder.layers.{place.split('.')[2]}."
        yield f"vision_tower.vision_model.{place}{GEMMA_VISION[leaf]}.{suffix}", value


def _vision_place(name: str) -> tuple[str, str, str]:
    """v.blk.3.ln1.weight -> ("v.blk.3.", "ln1", "weight"); v.post_ln.bias -> ("", "v.post_ln", ...)."""
    path, _, suffix = name.rpartition(".")
    if path.startswith(("v.blk.", "v.deepstack.")):
        block, _, leaf = path.rpartition(".")
        return f"{block}.", leaf, suffix
    return "", path, suffix
