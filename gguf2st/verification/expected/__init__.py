"""The complete parameters of model classes, as shape formulas over config.json.

Source: the classes in transformers' models/*/modeling_*.py, and for MTP blocks vLLM's
models/qwen3_5_mtp.py and qwen3_next_mtp.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gguf2st.verification.expected import decoders, towers
from gguf2st.verification.expected.base import (
    Builder,
    Expected,
    Experts,
    FieldError,
    Parameter,
    Part,
)

__all__ = ["Expected", "Experts", "FieldError", "Parameter", "Part", "expected_parameters"]

_TEXT: dict[str, Callable[[Builder], Expected]] = {
    "LlamaForCausalLM": decoders.llama,
    "MistralForCausalLM": decoders.llama,
    "MixtralForCausalLM": decoders.mixtral,
    "Qwen2ForCausalLM": decoders.qwen2,
    "Qwen2MoeForCausalLM": decoders.qwen2_moe,
    "Qwen3ForCausalLM": decoders.qwen3,
    "Qwen3MoeForCausalLM": decoders.qwen3_moe,
    "Qwen3NextForCausalLM": decoders.qwen3_next,
    "Qwen3_5ForCausalLM": decoders.qwen3_5,
    "Qwen3_5MoeForCausalLM": partial(decoders.qwen3_5, moe=True),
    "Gemma2ForCausalLM": partial(decoders.gemma, norms=False),
    "Gemma3ForCausalLM": partial(decoders.gemma, norms=True),
    "GptOssForCausalLM": decoders.gpt_oss,
}
_LANGUAGE_MODEL = "model.language_model."
_VISION: dict[str, Callable[[Builder], Expected]] = {
    "Qwen3VLForConditionalGeneration": partial(decoders.qwen3, prefix=_LANGUAGE_MODEL),
    "Qwen3VLMoeForConditionalGeneration": partial(
        decoders.qwen3_moe, prefix=_LANGUAGE_MODEL, transposed=True
    ),
    "Qwen3_5ForConditionalGeneration": partial(decoders.qwen3_5, prefix=_LANGUAGE_MODEL),
    "Qwen3_5MoeForConditionalGeneration": partial(
        decoders.qwen3_5, prefix=_LANGUAGE_MODEL, moe=True
    ),
}
_GEMMA_3 = "Gemma3ForConditionalGeneration"


def expected_parameters(model_class: str, config: Mapping[str, Any]) -> Expected | None:
    """All parameters, or None for a class that isn't written down.

    Raises `FieldError` where the config lacks a size, or has one that can't be.
    """
    if model_class in _TEXT:
        return _TEXT[model_class](Builder(config))
    if model_class in _VISION:
        tower = Builder(_section(config, "vision_config"))
        towers.qwen_vision(tower)
        text = _text(config)
        text.parameters = tower.parameters
        return _VISION[model_class](text)
    if model_class == _GEMMA_3:
        text = _text(config)
        tower = Builder(_section(config, "vision_config"))
        towers.siglip(tower, text.size("hidden_size"))
        text.parameters = tower.parameters
        return decoders.gemma(
            text, "language_model.model.", norms=True, head="language_model.lm_head"
        )
    return None


def _text(config: Mapping[str, Any]) -> Builder:
    """The text part; engines take tie_word_embeddings of the top level where only that is there."""
    text = _section(config, "text_config")
    tied = config.get("tie_word_embeddings")
    return Builder(({} if tied is None else {"tie_word_embeddings": tied}) | dict(text))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise FieldError(f"{name} isn't there")
    return section
