"""vLLM 0.32: how its model classes name and stack layers.

Read from vllm/model_executor/models/*.py and compared with the classes themselves,
built on the meta device (tests/engine_rules). `packed` and `mapper` are what the
quantization config gets: packed_modules_mapping as it is after construction (Qwen2Moe
adds gate_up_proj when it has a shared expert) and hf_to_vllm_mapper without its stacked
rules (WeightsMapper.get_rename_mapper).
"""

from __future__ import annotations

from dataclasses import replace

from gguf2st.engines.base import Kind
from gguf2st.engines.names import (
    EXPERT_PARTS,
    MIXTRAL_PARTS,
    Block,
    Layer,
    Mapper,
    ModelTable,
    Packed,
    siblings,
)


def _qkv(path: str = "self_attn.qkv_proj", parts: str = "q_proj k_proj v_proj") -> Layer:
    return Layer(path, Kind.QKV, "QKVParallelLinear", siblings(path, parts))


def _merged(path: str, parts: str, *cuts: str) -> Layer:
    return Layer(path, Kind.MERGED, "MergedColumnParallelLinear", siblings(path, parts), cuts=cuts)


def _column(path: str) -> Layer:
    return Layer(path, Kind.COLUMN, "ColumnParallelLinear", (path,))


def _row(path: str) -> Layer:
    return Layer(path, Kind.ROW, "RowParallelLinear", (path,))


def _router(path: str, *, asks: bool = False) -> Layer:
    reason = "" if asks else "vLLM never quantizes the router"
    return Layer(path, Kind.REPLICATED, "GateLinear", (path,), unquantized=reason)


def _experts(path: str, parts: tuple[str, ...] = EXPERT_PARTS) -> Layer:
    """Experts one by one; unquantized ones may also be stacked in two tensors."""
    names = tuple(f"{path}.{{}}.{part}" for part in parts)
    stacked = (path, f"{path}.gate_up_proj", f"{path}.down_proj")
    probes = tuple(f"0.{part}" for part in parts)
    return Layer(path, Kind.EXPERTS, "RoutedExperts", names + stacked, probes)


def _head(name: str, reason: str = "") -> Block:
    return Block("", name.removesuffix("lm_head"), (replace(_HEAD, unquantized=reason),))


_HEAD = Layer("lm_head", Kind.HEAD, "ParallelLMHead", ("lm_head",))
_EMBEDDING = Layer("embed_tokens", Kind.EMBEDDING, "VocabParallelEmbedding", ("embed_tokens",))
_ATTENTION = (_qkv(), _row("self_attn.o_proj"))
_MLP = (_merged("mlp.gate_up_proj", "gate_proj up_proj"), _row("mlp.down_proj"))
_SHARED = (
    _merged("mlp.shared_expert.gate_up_proj", "gate_proj up_proj"),
    _row("mlp.shared_expert.down_proj"),
    Layer(
        "mlp.shared_expert_gate",
        Kind.REPLICATED,
        "ReplicatedLinear",
        ("mlp.shared_expert_gate",),
        unquantized="vLLM never quantizes the gate of the shared expert",
    ),
)
_DELTA = (
    _merged("linear_attn.in_proj_qkvz", "in_proj_qkv in_proj_z", "key key value", "value"),
    _merged("linear_attn.in_proj_ba", "in_proj_b in_proj_a"),
    _row("linear_attn.out_proj"),
)
_DELTA_NEXT = (
    _merged("linear_attn.in_proj_qkvz", "in_proj_qkvz"),
    _merged("linear_attn.in_proj_ba", "in_proj_ba"),
    _row("linear_attn.out_proj"),
)
_QWEN_VISION = (
    Block(
        "model.visual.blocks.{}.",
        "visual.blocks.{}.",
        (
            replace(_qkv("attn.qkv", "qkv"), cuts=("third third third",)),
            _row("attn.proj"),
            _column("mlp.linear_fc1"),
            _row("mlp.linear_fc2"),
        ),
    ),
    Block("model.visual.merger.", "visual.merger.", (_column("linear_fc1"), _row("linear_fc2"))),
    Block(
        "model.visual.deepstack_merger_list.{}.",
        "visual.deepstack_merger_list.{}.",
        (_column("linear_fc1"), _row("linear_fc2")),
    ),
)
# models/qwen3_5_mtp.py, qwen3_next_mtp.py: the drafter is a model of its own, without a mapper.
_MTP_FC = Block("mtp.", "mtp.", (_column("fc"),), drafter=True)

QKV: Packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATE_UP: Packed = {"gate_up_proj": ("gate_proj", "up_proj")}
VISION_QKV: Packed = {"qkv": ("qkv",)}
DELTA: Packed = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
DELTA_NEXT: Packed = {"in_proj_qkvz": ("in_proj_qkvz",), "in_proj_ba": ("in_proj_ba",)}
# models/qwen3_vl.py, qwen3_5.py
VL_MAPPER = Mapper(
    prefix={
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
    }
)


def _text(*layers: Layer, embedding: bool = True, head: str = "") -> tuple[Block, ...]:
    """`head` says why the output head is never quantized."""
    whole = (Block("model.", "model.", (_EMBEDDING,)),) if embedding else ()
    return (Block("model.layers.{}.", "model.layers.{}.", layers), *whole, _head("lm_head", head))


def _vl(*layers: Layer, head: str, embedding: bool = True) -> tuple[Block, ...]:
    inner = "language_model.model."
    whole = (Block("model.language_model.", inner, (_EMBEDDING,)),) if embedding else ()
    return (
        Block("model.language_model.layers.{}.", f"{inner}layers.{{}}.", layers),
        *whole,
        *_QWEN_VISION,
        _head(head),
    )


def _drafter(*layers: Layer) -> tuple[Block, ...]:
    return (_MTP_FC, Block("mtp.layers.{}.", "mtp.layers.{}.", layers, drafter=True))


_DENSE_35 = (*_ATTENTION, *_MLP, *_DELTA)
_MOE_35 = (*_ATTENTION, *_DELTA, _router("mlp.gate"), _experts("mlp.experts"), *_SHARED)
_MTP_DENSE = _drafter(*_ATTENTION, *_MLP)
_MTP_MOE = _drafter(*_ATTENTION, _router("mlp.gate"), _experts("mlp.experts"), *_SHARED)

# models/gpt_oss.py calls attention "attn" and loads stacked experts.
_GPT_OSS = (
    *(
        replace(layer, parts=tuple(f"self_{part}" for part in layer.parts))
        for layer in (_qkv("attn.qkv_proj"), _row("attn.o_proj"))
    ),
    _router("mlp.router"),
    replace(_experts("mlp.experts"), layer_class="GptOssRoutedExperts", cuts=("half half",)),
)

MODELS: dict[str, ModelTable] = {
    "LlamaForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP, embedding=False), QKV | GATE_UP),
    "MixtralForCausalLM": ModelTable(
        _text(
            *_ATTENTION,
            _router("block_sparse_moe.gate"),
            _experts("block_sparse_moe.experts", MIXTRAL_PARTS),
            embedding=False,
        ),
        QKV,
        Mapper(substr={".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}),
    ),
    "Qwen2ForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP), QKV | GATE_UP),
    "Qwen2MoeForCausalLM": ModelTable(
        _text(*_ATTENTION, _router("mlp.gate"), _experts("mlp.experts"), *_SHARED), QKV | GATE_UP
    ),
    "Qwen3ForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP), QKV | GATE_UP),
    "Qwen3MoeForCausalLM": ModelTable(
        _text(*_ATTENTION, _router("mlp.gate", asks=True), _experts("mlp.experts")), QKV
    ),
    "GptOssForCausalLM": ModelTable(
        _text(
            *_GPT_OSS,
            embedding=False,
            head="vLLM builds gpt-oss's output head without quantization",
        ),
        QKV,
        Mapper(substr={".self_attn.": ".attn."}),
    ),
    "Qwen3NextForCausalLM": ModelTable(
        _text(
            *_ATTENTION,
            *_DELTA_NEXT,
            _router("mlp.gate"),
            _experts("mlp.experts"),
            *_SHARED,
            embedding=False,
            head="vLLM builds Qwen3-Next's output head without quantization",
        )
        + _MTP_MOE,
        QKV | GATE_UP | DELTA_NEXT,
        drafter_packed=QKV | GATE_UP,
    ),
    "Qwen3VLForConditionalGeneration": ModelTable(
        _vl(*_ATTENTION, *_MLP, head="lm_head"), QKV | GATE_UP | VISION_QKV, VL_MAPPER
    ),
    "Qwen3VLMoeForConditionalGeneration": ModelTable(
        _vl(
            *_ATTENTION,
            _router("mlp.gate", asks=True),
            _experts("mlp.experts"),
            head="language_model.lm_head",
        ),
        QKV,
        VL_MAPPER,
    ),
    "Qwen3_5ForCausalLM": ModelTable(
        _text(*_DENSE_35, embedding=False) + _MTP_DENSE,
        QKV | GATE_UP | DELTA,
        Mapper(prefix={"model.language_model.": "model."}),
        QKV | GATE_UP,
    ),
    "Qwen3_5MoeForCausalLM": ModelTable(
        _text(*_MOE_35, embedding=False) + _MTP_MOE,
        QKV | GATE_UP | DELTA,
        Mapper(prefix={"model.language_model.": "model."}),
        QKV | GATE_UP,
    ),
    "Qwen3_5ForConditionalGeneration": ModelTable(
        _vl(*_DENSE_35, head="language_model.lm_head", embedding=False) + _MTP_DENSE,
        QKV | GATE_UP | VISION_QKV | DELTA,
        VL_MAPPER,
        QKV | GATE_UP,
    ),
    "Qwen3_5MoeForConditionalGeneration": ModelTable(
        _vl(*_MOE_35, head="language_model.lm_head", embedding=False) + _MTP_MOE,
        QKV | GATE_UP | VISION_QKV | DELTA,
        VL_MAPPER,
        QKV | GATE_UP,
    ),
    # Both tie the head to the embedding and build none.
    "Gemma2ForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP, embedding=False)[:1], QKV | GATE_UP),
    "Gemma3ForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP), QKV | GATE_UP),
    "Gemma3ForConditionalGeneration": ModelTable(
        (
            Block(
                "language_model.model.layers.{}.",
                "language_model.model.layers.{}.",
                (*_ATTENTION, *_MLP),
            ),
            Block("language_model.model.", "language_model.model.", (_EMBEDDING,)),
            _head("language_model.lm_head"),
            Block(
                "vision_tower.vision_model.encoder.layers.{}.",
                "vision_tower.vision_model.encoder.layers.{}.",
                (
                    _qkv(),
                    _row("self_attn.out_proj"),
                    # Only where both widths are multiples of 64 (models/siglip.py).
                    _column("mlp.fc1"),
                    _row("mlp.fc2"),
                ),
            ),
        ),
        QKV | GATE_UP,
        Mapper(
            prefix={
                "model.language_model.": "language_model.model.",
                "model.vision_tower.": "vision_tower.",
                "model.multi_modal_projector.": "multi_modal_projector.",
                "lm_head.": "language_model.lm_head.",
            }
        ),
    ),
}
