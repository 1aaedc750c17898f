"""config.json and the files of processors and generation say what the original's say."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.conversions import Case, cases, converted

Fields = dict[str, Any]

# Fields of an original config.json that the output hasn't, and why it can do without.
NOT_WRITTEN = {
    r"transformers_version": "who wrote the file",
    r"(.*\.)?use_cache": "a default of generate(), true everywhere",
    r"(.*\.)?(initializer_range|router_jitter_noise|attention_dropout)": "only for training",
    r"(.*\.)?(router_aux_loss_coef|output_router_logits)": "only for training",
    r"(.*\.)?pretraining_tp": "how an old implementation cut its matrix products",
    r"(.*\.)?partial_rotary_factor": "a copy of the one in rope_parameters",
    # The class makes the same of what is there; otherwise the second test would fail.
    r"(.*\.)?layer_types": "follows from other fields",
    r"(.*\.)?_sliding_window_pattern": "transformers' own copy of sliding_window_pattern",
    r"(.*\.)?(sliding_window|max_window_layers)": "counts with use_sliding_window alone",
    r"swiglu_alpha": "1.702 of all gpt-oss models, and not in published files",
    r"(.*\.)?use_bidirectional_attention": "false but in embedding models",
    r"qkv_bias": "true of all Qwen2-MoE models",
    r"vision_config\.rope_parameters\..*": "fixed by the class of the vision tower",
}
# Fields of the output that an original needn't have.
ADDED = {
    r".+_config\.dtype": "each part of the model says how it is stored",
    r"(.*\.)?norm_topk_prob": "true of models whose class doesn't ask",
    r"(.*\.)?use_sliding_window": "false; Qwen3-VL has no window",
    r"attn_output_gate|mamba_ssm_dtype|mtp_.*": "as Qwen3.5 has it; Qwen3-Next's class doesn't ask",
    r"(attention|mlp)_bias": "false; Llama's class asks, Mistral's doesn't",
    r"(.*\.)?(hidden_act|rope_local_base_freq|sliding_window_pattern)": "as published by Gemma",
}

# What a checkpoint becomes that is converted without its vision tower, or that llama.cpp treats
# as another architecture: the class and model type of the output.
AS_TEXT = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "MistralForCausalLM": ("LlamaForCausalLM", "llama"),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", "qwen3"),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}
# Fields that only the original's class has.
ONLY_MULTIMODAL = {
    "qwen3": ("mrope_section", "mrope_interleaved"),  # text has the same position on all axes
    "qwen3_moe": ("mrope_section", "mrope_interleaved"),
    "llama": ("sliding_window",),  # Mistral's; llama.cpp's architecture llama has no window
}


def read(path: Path) -> Fields:
    return json.loads(path.read_text("utf-8"))


def expected_config(case: Case) -> Fields:
    """The original's config.json, changed where the files of the case hold another model."""
    config = read(case.folder / "config.json")
    original_class = config["architectures"][0]
    if case.mmproj is None and original_class in AS_TEXT:
        model_class, model_type = AS_TEXT[original_class]
        text = config.get("text_config", config)
        config = text | {"architectures": [model_class], "model_type": model_type}
        config["dtype"] = "bfloat16"
        if model_type == "qwen3_moe":
            config["norm_topk_prob"] = True  # what Qwen3-VL-MoE always does
        for field in ONLY_MULTIMODAL.get(model_type, ()):
            config.pop(field, None)
            config["rope_parameters"].pop(field, None)
    text = config.get("text_config", config)
    text["head_dim"] = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if "mtp_num_hidden_layers" in text and not case.has_mtp:
        text["mtp_num_hidden_layers"] = 0
    config.pop("quantization_config", None)  # the output isn't quantized
    # transformers saves other names than published files have, and reads both alike.
    if "num_local_experts" in text and config["model_type"] not in ("mixtral", "gpt_oss"):
        text["num_experts"] = text.pop("num_local_experts")
    if config["model_type"].startswith("qwen3_vl"):
        config["vision_config"]["model_type"] = config["model_type"]
    return config


def flat(config: Fields, prefix: str = "") -> Fields:
    """Nested fields under dotted names; a null is no field."""
    result: Fields = {}
    for key, value in config.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            result[f"{prefix}{key}"] = value
    return result


def listed(name: str, patterns: dict[str, str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def differences(original: Fields, written: Fields) -> dict[str, tuple[Any, Any]]:
    """Name -> original and written value."""
    original, written = flat(original), flat(written)
    return {
        name: (original.get(name), written.get(name))
        for name in original.keys() | written.keys()
        if original.get(name) != written.get(name)
        and not (name not in written and listed(name, NOT_WRITTEN))
        and name != "_name_or_path"  # where transformers read the file
        and not (name not in original and listed(name, ADDED))
    }


@pytest.mark.parametrize("case", cases(), ids=str)
def test_config_json_has_the_original_fields_and_no_others(case: Case) -> None:
    found = differences(expected_config(case), read(converted(case) / "config.json"))
    assert not found


@pytest.mark.parametrize("case", cases(), ids=str)
def test_transformers_reads_the_same_configuration(case: Case, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(expected_config(case)), "utf-8")
    original = transformers.AutoConfig.from_pretrained(tmp_path)
    written = transformers.AutoConfig.from_pretrained(converted(case))
    assert type(written) is type(original)
    found = differences(original.to_dict(), written.to_dict())
    assert not found


@pytest.mark.parametrize("case", cases(), ids=str)
def test_generation_stops_and_samples_as_the_original(case: Case) -> None:
    original = transformers.GenerationConfig.from_pretrained(case.folder).to_dict()
    written = transformers.GenerationConfig.from_pretrained(converted(case)).to_dict()
    ends = [config.pop("eos_token_id") for config in (original, written)]
    assert not differences(original, written)
    first, *others = (set(end if isinstance(end, list) else [end]) for end in ends)
    assert first <= others[0]
    # llama.cpp stops at every token that ends a text or turn, not only at the one of the key.
    tokenizer = transformers.AutoTokenizer.from_pretrained(case.folder)
    assert {tokenizer.convert_ids_to_tokens(i) for i in others[0] - first} <= {
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
    }


@pytest.mark.parametrize("case", [case for case in cases() if case.mmproj], ids=str)
def test_processor_prepares_images_as_the_original(case: Case) -> None:
    if not case.folder.name.startswith("gemma"):
        pytest.importorskip("torchvision")  # for videos
    pixels = np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    prepared = []
    for directory in (case.folder, converted(case)):
        processor = transformers.AutoProcessor.from_pretrained(directory)
        text = processor.apply_chat_template([message], add_generation_prompt=True)
        prepared.append(
            processor(text=[text], images=[Image.fromarray(pixels)], return_tensors="pt")
        )
    original, written = prepared
    assert written.keys() == original.keys()
    assert len(original["pixel_values"]) > 0
    assert all(torch.equal(written[key], original[key]) for key in original)
