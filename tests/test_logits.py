"""The output computes what llama.cpp computes: the same tokens, the same log-probabilities.

llama.cpp runs on the GGUF with all tensors decoded to F32: on quantized tensors it would quantize
the activations too, and differ from any checkpoint by that.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import gguf2st
from tests.conversions import Case, cases, converted, one_per_folder
from tests.oracles import llama_cpp, real_models

# Long enough for the fixtures' attention windows of 16 tokens to matter.
PROMPT = (
    "In 1905 Einstein wrote four papers; the third, on 'moving bodies', changed physics.\n"
    "It's 3.14159 -- isn't it? Größere Äpfel, 東京 and def f(x): return x+42"
)
# Both sides compute in float32 and sum in different orders, which made 4e-5 at most here. Qwen3-VL
# alone differs by 1e-3: llama.cpp leaves the slowest rotary frequency of its interleaved sections
# at position 0 where transformers turns it (ggml_mrope_cache_init, the last `else`).
TOLERANCE = 0.005
# llama.cpp takes Gemma's GELU from a table of F16 numbers.
GELU_TOLERANCE = 0.05


@pytest.mark.parametrize("case", one_per_folder(cases()), ids=str)
def test_fixture_computes_what_llama_cpp_computes(case: Case, tmp_path: Path) -> None:
    distances = compare(case.model, converted(case, "f32"), tmp_path)
    # Where two experts are nearly even, rounding decides which one is used, and that position
    # differs wholly: with experts, nine positions of ten have to agree.
    experts = "num_experts_per_tok" in (converted(case, "f32") / "config.json").read_text("utf-8")
    tolerance = GELU_TOLERANCE if case.folder.name.startswith("gemma") else TOLERANCE
    assert np.quantile(distances, 0.9 if experts else 1) <= tolerance


def test_smollm2_computes_what_llama_cpp_computes(tmp_path: Path) -> None:
    model = real_models.smollm2()
    gguf2st.convert(model, tmp_path / "converted", to="f32")
    assert compare(model, tmp_path / "converted", tmp_path).max() <= TOLERANCE


def test_gemma3_computes_what_llama_cpp_computes(tmp_path: Path) -> None:
    model = real_models.gemma3_270m()
    gguf2st.convert(model, tmp_path / "converted", to="f32")
    assert compare(model, tmp_path / "converted", tmp_path).max() <= GELU_TOLERANCE


def compare(model: Path, directory: Path, scratch: Path) -> np.ndarray:
    """The largest difference of log-probabilities at each position of the prompt."""
    decoded = scratch / "f32.gguf"
    llama_cpp.requantize_to_f32(model, decoded)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(PROMPT).input_ids
    with llama_cpp.Model(decoded) as runtime:
        assert ids == runtime.tokenize(PROMPT)
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": "Hello!"}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            templated = tokenizer(text, add_special_tokens=False).input_ids
            assert templated == runtime.tokenize(text, add_special=False)
        theirs = torch.from_numpy(runtime.logits(ids))
    config = transformers.AutoConfig.from_pretrained(directory)
    if config.model_type == "gpt_oss":
        # llama.cpp rounds YaRN's range of dimensions, always (ggml_rope_yarn_corr_dims).
        assert config.rope_parameters["truncate"] is False
        config.rope_parameters["truncate"] = True
    network = transformers.AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32
    )
    with torch.no_grad():
        ours = network(torch.tensor([ids])).logits[0]
    assert ours.shape == theirs.shape
    assert len(ids) >= 32
    distances = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().amax(-1)
    return distances.numpy()
