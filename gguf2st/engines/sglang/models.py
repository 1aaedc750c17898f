"""SGLang 0.5.23: how its model classes name and stack layers.

Read from sglang/srt/models/*.py and compared with the classes themselves, built on a
fake GPU (tests/engine_rules). Three classes don't name their layers as the checkpoint
does, so that an entry with a full name never matches them: Mixtral ("layers.0..."
without "model."), Gemma 2 ("self_attn.qkv_proj" in every layer) and Qwen3-VL, whose
mapper renames the entries but not the layers.
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

VISION = "SGLang builds the vision tower without quantization"
GPT_OSS_ATTENTION = "SGLang builds gpt-oss's attention without quantization"
# models/qwen3_next.py takes `.weight` of the layer to wrap its loader.
NEXT_LOADER = "SGLang's Qwen3-Next wraps the loader of the tensor `weight`"


def _qkv(path: str = "self_attn.qkv_proj", parts: str = "q_proj k_proj v_proj") -> Layer:
    return Layer(path, Kind.QKV, "QKVParallelLinear", siblings(path, parts))


def _merged(path: str, parts: str, *cuts: str, only_weight: str = "") -> Layer:
    return Layer(
        path,
        Kind.MERGED,
        "MergedColumnParallelLinear",
        siblings(path, parts),
        only_weight=only_weight,
        cuts=cuts,
    )


def _column(path: str) -> Layer:
    return Layer(path, Kind.COLUMN, "ColumnParallelLinear", (path,))


def _row(path: str, part: str = "") -> Layer:
    return Layer(path, Kind.ROW, "RowParallelLinear", (part or path,))


def _never(path: str, reason: str) -> Layer:
    return Layer(path, Kind.REPLICATED, "ReplicatedLinear", (path,), unquantized=reason)


def _router(path: str) -> Layer:
    return _never(path, "SGLang never quantizes the router")


def _experts(path: str, parts: tuple[str, ...] = EXPERT_PARTS, *, stacks: bool = False) -> Layer:
    """Experts one by one; where the class reads `stacks`, unquantized ones also in two tensors.

    Whatever the checkpoint calls them, compressed-tensors rules are asked for
    gate_proj, up_proj and down_proj (compressed_tensors.py, get_moe_scheme).
    """
    names = tuple(f"{path}.{{}}.{part}" for part in parts)
    if stacks:
        names += (path, f"{path}.gate_up_proj", f"{path}.down_proj")
    probes = tuple(f"0.{part}" for part in EXPERT_PARTS)
    return Layer(path, Kind.EXPERTS, "FusedMoE", names, probes)


def _head(name: str = "lm_head", reason: str = "") -> Block:
    layer = Layer("lm_head", Kind.HEAD, "ParallelLMHead", ("lm_head",), unquantized=reason)
    return Block("", name.removesuffix("lm_head"), (layer,))


_ATTENTION = (_qkv(), _row("self_attn.o_proj"))
_MLP = (_merged("mlp.gate_up_proj", "gate_proj up_proj"), _row("mlp.down_proj"))
_SHARED = (
    _merged("mlp.shared_expert.gate_up_proj", "gate_proj up_proj"),
    _row("mlp.shared_expert.down_proj"),
    _never("mlp.shared_expert_gate", "SGLang never quantizes the gate of the shared expert"),
)
_DELTA = (
    _merged("linear_attn.in_proj_qkvz", "in_proj_qkv in_proj_z", "key key value", "value"),
    _merged("linear_attn.in_proj_ba", "in_proj_b in_proj_a"),
    _row("linear_attn.out_proj"),
)
_DELTA_NEXT = (
    _merged(
        "linear_attn.in_proj_qkvz",
        "in_proj_qkvz",
        "key key value value",
        only_weight=NEXT_LOADER,
    ),
    _merged("linear_attn.in_proj_ba", "in_proj_ba", "heads heads", only_weight=NEXT_LOADER),
    _row("linear_attn.out_proj"),
)
# models/qwen2_moe.py can_fuse_shared_expert, asked by Qwen3-Next alone: where the widths are
# equal, and in the published models they are, the shared expert becomes one more expert.
_SHARED_NEXT = (
    *(replace(layer, partner="mlp.experts") for layer in _SHARED[:2]),
    _SHARED[2],
)
_QWEN_VISION = (
    Block(
        "model.visual.blocks.{}.",
        "model.visual.blocks.{}.",
        tuple(
            _never(path, VISION)
            for path in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
        ),
    ),
    Block(
        "model.visual.merger.",
        "model.visual.merger.",
        (_never("linear_fc1", VISION), _never("linear_fc2", VISION)),
    ),
    Block(
        "model.visual.deepstack_merger_list.{}.",
        "model.visual.deepstack_merger_list.{}.",
        (_never("linear_fc1", VISION), _never("linear_fc2", VISION)),
    ),
)

QKV: Packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATE_UP: Packed = {"gate_up_proj": ("gate_proj", "up_proj")}
DELTA: Packed = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
# models/qwen3_vl.py; the layers keep "model.language_model.", so what this renames is lost.
VL_MAPPER = Mapper(
    substr={"attn.qkv": "attn.qkv_proj"},
    prefix={
        "model.language_model.": "language_model.model.",
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.": "language_model.model.",
    },
)


def _text(*layers: Layer) -> tuple[Block, ...]:
    return (Block("model.layers.{}.", "model.layers.{}.", layers), _head())


def _vl(*layers: Layer) -> tuple[Block, ...]:
    prefix = "model.language_model.layers.{}."
    return (Block(prefix, prefix, layers), *_QWEN_VISION, _head())


def _drafter(*layers: Layer, prefix: str = "mtp.") -> tuple[Block, ...]:
    """models/qwen3_5_mtp.py, qwen3_next_mtp.py: `fc` is a plain nn.Linear."""
    fc = _never("fc", "SGLang builds mtp.fc without quantization")
    return (
        Block("mtp.", prefix, (fc,), drafter=True),
        Block("mtp.layers.{}.", f"{prefix}layers.{{}}.", layers, drafter=True),
    )


_DENSE_35 = (*_ATTENTION, *_MLP, *_DELTA)
_MOE_35 = (
    *_ATTENTION,
    *_DELTA,
    _router("mlp.gate"),
    _experts("mlp.experts", stacks=True),
    *_SHARED,
)
_MTP_DENSE = _drafter(*_ATTENTION, *_MLP)
_MTP_MOE = _drafter(
    *_ATTENTION, _router("mlp.gate"), _experts("mlp.experts", stacks=True), *_SHARED
)
# The drafter of Qwen3-Next calls its layers like the model's own: rules can't tell them apart.
_MTP_NEXT = _drafter(
    *_ATTENTION, _router("mlp.gate"), _experts("mlp.experts"), *_SHARED_NEXT, prefix="model."
)
_PACKED_35: Packed = QKV | GATE_UP | DELTA

MODELS: dict[str, ModelTable] = {
    "LlamaForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP)),
    "MixtralForCausalLM": ModelTable(
        (
            Block(
                "model.layers.{}.",
                "layers.{}.",
                (
                    *_ATTENTION,
                    _router("block_sparse_moe.gate"),
                    _experts("block_sparse_moe.experts", MIXTRAL_PARTS),
                ),
            ),
            _head(reason="SGLang builds Mixtral's output head without quantization"),
        )
    ),
    "Qwen2ForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP)),
    "Qwen2MoeForCausalLM": ModelTable(
        _text(*_ATTENTION, _router("mlp.gate"), _experts("mlp.experts"), *_SHARED)
    ),
    "Qwen3ForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP)),
    "Qwen3MoeForCausalLM": ModelTable(
        _text(*_ATTENTION, _router("mlp.gate"), _experts("mlp.experts")), QKV | GATE_UP
    ),
    "Qwen3NextForCausalLM": ModelTable(
        _text(
            *_ATTENTION,
            *_DELTA_NEXT,
            _router("mlp.gate"),
            _experts("mlp.experts"),
            *_SHARED_NEXT,
        )
        + _MTP_NEXT,
        QKV | GATE_UP,
        drafter_packed=QKV | GATE_UP,
    ),
    "Qwen3VLForConditionalGeneration": ModelTable(_vl(*_ATTENTION, *_MLP), {}, VL_MAPPER),
    "Qwen3VLMoeForConditionalGeneration": ModelTable(
        _vl(*_ATTENTION, _router("mlp.gate"), _experts("mlp.experts", stacks=True)), {}, VL_MAPPER
    ),
    "Qwen3_5ForCausalLM": ModelTable(
        _text(*_DENSE_35) + _MTP_DENSE, _PACKED_35, drafter_packed=_PACKED_35
    ),
    "Qwen3_5MoeForCausalLM": ModelTable(
        _text(*_MOE_35) + _MTP_MOE, _PACKED_35, drafter_packed=_PACKED_35
    ),
    "Qwen3_5ForConditionalGeneration": ModelTable(
        _vl(*_DENSE_35) + _MTP_DENSE, _PACKED_35, drafter_packed=_PACKED_35
    ),
    "Qwen3_5MoeForConditionalGeneration": ModelTable(
        _vl(*_MOE_35) + _MTP_MOE, _PACKED_35, drafter_packed=_PACKED_35
    ),
    # models/gpt_oss.py calls the router "gate".
    "GptOssForCausalLM": ModelTable(
        (
            Block(
                "model.layers.{}.",
                "model.layers.{}.",
                (
                    *(replace(layer, unquantized=GPT_OSS_ATTENTION) for layer in _ATTENTION),
                    replace(_router("mlp.gate"), parts=("mlp.router",)),
                    replace(_experts("mlp.experts", stacks=True), cuts=("half half",)),
                ),
            ),
            _head(reason="SGLang builds gpt-oss's output head without quantization"),
        )
    ),
    # models/gemma2.py drops the prefix of the layer.
    "Gemma2ForCausalLM": ModelTable(
        (Block("model.layers.{}.", "", (*_ATTENTION, *_MLP)),), QKV | GATE_UP
    ),
    "Gemma3ForCausalLM": ModelTable(_text(*_ATTENTION, *_MLP), QKV | GATE_UP),
    "Gemma3ForConditionalGeneration": ModelTable(
        (
            Block(
                "language_model.model.layers.{}.",
                "language_model.model.layers.{}.",
                (*_ATTENTION, *_MLP),
            ),
            _head("language_model.lm_head"),
            # models/siglip.py asks for quantization, and calls out_proj "proj".
            Block(
                "vision_tower.vision_model.encoder.layers.{}.",
                "vision_tower.vision_model.encoder.layers.{}.",
                (
                    _qkv(),
                    _row("self_attn.proj", "self_attn.out_proj"),
                    _column("mlp.fc1"),
                    _row("mlp.fc2"),
                ),
            ),
        ),
        QKV | GATE_UP,
    ),
}
