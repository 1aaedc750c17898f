"""transformers 5.19: which modules are `nn.Linear`, and what they are called beside the files.

Its quantizers replace `nn.Linear` modules and match rules with the model's own names,
which differ from the checkpoint's where a conversion mapping renames on load
(transformers/conversion_mapping.py). Experts are no modules but stacked parameters;
single experts of a checkpoint are merged on load where the class has a converter for
them. Routers are no `nn.Linear` any more. Only fp8's list of exceptions is renamed like
the tensors are (`mapper`); rules of compressed-tensors and AWQ are taken as written.
"""

from __future__ import annotations

from dataclasses import replace

from gguf2st.engines.base import Kind
from gguf2st.engines.names import EXPERT_PARTS, MIXTRAL_PARTS, Block, Layer, Mapper, ModelTable

# Qwen3-VL-MoE has no converter that merges single experts.
NO_MERGE = "transformers merges no single experts for this class"


def _linear(path: str) -> tuple[Layer, ...]:
    return tuple(Layer(p, Kind.REPLICATED, "Linear", (p,)) for p in path.split())


def _experts(
    path: str, parts: tuple[str, ...] = EXPERT_PARTS, source: str = "", reason: str = ""
) -> Layer:
    source = source or path
    names = tuple(f"{source}.{{}}.{part}" for part in parts)
    stacked = (source, f"{source}.gate_up_proj", f"{source}.down_proj")
    return Layer(path, Kind.EXPERTS, "Experts", names + stacked, unquantized=reason)


_ATTENTION = _linear("self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj")
_MLP = _linear("mlp.gate_proj mlp.up_proj mlp.down_proj")
_SHARED = _linear(
    "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert.down_proj "
    "mlp.shared_expert_gate"
)
_DELTA = _linear(
    "linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.in_proj_b linear_attn.in_proj_a "
    "linear_attn.out_proj"
)
_DELTA_NEXT = _linear("linear_attn.in_proj_qkvz linear_attn.in_proj_ba linear_attn.out_proj")
_HEAD = Block("", "", (Layer("lm_head", Kind.HEAD, "Linear", ("lm_head",)),))
_QWEN_VISION = (
    Block(
        "model.visual.blocks.{}.",
        "model.visual.blocks.{}.",
        _linear("attn.qkv attn.proj mlp.linear_fc1 mlp.linear_fc2"),
    ),
    Block("model.visual.merger.", "model.visual.merger.", _linear("linear_fc1 linear_fc2")),
    Block(
        "model.visual.deepstack_merger_list.{}.",
        "model.visual.deepstack_merger_list.{}.",
        _linear("linear_fc1 linear_fc2"),
    ),
)


def _text(*layers: Layer) -> ModelTable:
    return ModelTable((Block("model.layers.{}.", "model.layers.{}.", layers), _HEAD))


def _vl(*layers: Layer) -> ModelTable:
    prefix = "model.language_model.layers.{}."
    return ModelTable((Block(prefix, prefix, layers), *_QWEN_VISION, _HEAD))


_MOE = _experts("mlp.experts")

MODELS: dict[str, ModelTable] = {
    "LlamaForCausalLM": _text(*_ATTENTION, *_MLP),
    # conversion_mapping.py renames block_sparse_moe to mlp.
    "MixtralForCausalLM": replace(
        _text(*_ATTENTION, _experts("mlp.experts", MIXTRAL_PARTS, "block_sparse_moe.experts")),
        mapper=Mapper(substr={".block_sparse_moe.": ".mlp."}),
    ),
    "Qwen2ForCausalLM": _text(*_ATTENTION, *_MLP),
    "Qwen2MoeForCausalLM": _text(*_ATTENTION, _MOE, *_SHARED),
    "Qwen3ForCausalLM": _text(*_ATTENTION, *_MLP),
    "Qwen3MoeForCausalLM": _text(*_ATTENTION, _MOE),
    "Qwen3NextForCausalLM": _text(*_ATTENTION, *_DELTA_NEXT, _MOE, *_SHARED),
    "Qwen3VLForConditionalGeneration": _vl(*_ATTENTION, *_MLP),
    "Qwen3VLMoeForConditionalGeneration": _vl(
        *_ATTENTION, _experts("mlp.experts", reason=NO_MERGE)
    ),
    "Qwen3_5ForCausalLM": _text(*_ATTENTION, *_MLP, *_DELTA),
    "Qwen3_5MoeForCausalLM": _text(*_ATTENTION, *_DELTA, _MOE, *_SHARED),
    "Qwen3_5ForConditionalGeneration": _vl(*_ATTENTION, *_MLP, *_DELTA),
    "Qwen3_5MoeForConditionalGeneration": _vl(*_ATTENTION, *_DELTA, _MOE, *_SHARED),
    "Gemma2ForCausalLM": _text(*_ATTENTION, *_MLP),
    "Gemma3ForCausalLM": _text(*_ATTENTION, *_MLP),
    "GptOssForCausalLM": _text(*_ATTENTION, replace(_MOE, cuts=("half half",))),
    # conversion_mapping.py: LlavaModel's prefixes, and SigLIP's without "vision_model".
    "Gemma3ForConditionalGeneration": ModelTable(
        (
            Block(
                "language_model.model.layers.{}.",
                "model.language_model.layers.{}.",
                (*_ATTENTION, *_MLP),
            ),
            Block(
                "vision_tower.vision_model.encoder.layers.{}.",
                "model.vision_tower.encoder.layers.{}.",
                _linear(
                    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj "
                    "mlp.fc1 mlp.fc2"
                ),
            ),
            _HEAD,
        ),
        mapper=Mapper(
            prefix={
                "language_model.model.": "model.language_model.",
                "vision_tower.vision_model.": "model.vision_tower.",
            }
        ),
    ),
}
