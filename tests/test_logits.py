"""The output computes what llama.cpp computes: the same tokens, the same log-probabilities.

llama.cpp runs on the GGUF with all tensors decoded to F32; on quantized tensors it would quantize
the activations too, and differ from any checkpoint by that.
"""

from pathlib import Path

import gguf2st
import numpy as np
import pytest
import torch
import transformers

from tests.conversions import Case, cases, converted
from tests.oracles import llama_cpp

# Natural text, numbers, punctuation, other scripts and a line break: about 90 tokens of the
# fixtures' small vocabularies, 60 of real ones.
PROMPT = (
    "In 1905 Einstein wrote four papers; the third, on \"moving bodies\", changed physics.\n"
    "It's 3.14159 -- isn't it? Fünf größere Äpfel, 東京 and Москва, def f(x): return x + 42"
)
# Both sides compute in float32 but sum in other orders and, in llama.cpp, multiply some matrices
# with F16 tables (the GELU) and F16 K*Q products: 0.02 at most was ever seen on these models. An
# unrotated head or a norm without its 1 moves log-probabilities by several units.
TOLERANCE = 0.05


def one_per_folder() -> list[Case]:
    """The last model of each folder: all files of a folder hold the same model.

    The last, because llama.cpp can't read every old form any more; those have longer names.
    """
    return list({case.folder: case for case in cases() if not (case.mmproj or case.mtp)}.values())


@pytest.mark.parametrize("case", one_per_folder(), ids=str)
def test_fixture_computes_what_llama_cpp_computes(case: Case, tmp_path: Path) -> None:
    differences = compare(case.model, converted(case, "f32"), tmp_path)
    experts = "num_experts" in (converted(case, "f32") / "config.json").read_text("utf-8")
    # Where two experts are nearly even, a rounding error decides which is used, and that
    # position differs wholly: with experts, the median position has to agree.
    print("FIG", case, experts, differences.max(), np.median(differences))
    assert (np.median(differences) if experts else differences.max()) <= TOLERANCE


def test_smollm2_computes_what_llama_cpp_computes(tmp_path: Path) -> None:
    from tests.oracles import real_models

    model = real_models.smollm2()
    gguf2st.convert(model, tmp_path / "converted", to="f32")
    assert compare(model, tmp_path / "converted", tmp_path).max() <= TOLERANCE


def test_gemma3_computes_what_llama_cpp_computes(tmp_path: Path) -> None:
    from tests.oracles import real_models

    model = real_models.gemma3_270m()
    gguf2st.convert(model, tmp_path / "converted", to="f32")
    assert compare(model, tmp_path / "converted", tmp_path).max() <= TOLERANCE


def compare(model: Path, directory: Path, scratch: Path) -> np.ndarray:
    """The largest difference of log-probabilities at each position of the prompt."""
    decoded = scratch / "f32.gguf"
    llama_cpp.requantize_to_f32(model, decoded)
    ids = transformers.AutoTokenizer.from_pretrained(directory)(PROMPT).input_ids
    with llama_cpp.Model(decoded) as runtime:
        assert ids == runtime.tokenize(PROMPT)
        assert len(ids) >= 32
        theirs = torch.from_numpy(runtime.logits(ids))
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        ours = network(torch.tensor([ids])).logits[0]
    assert ours.shape == theirs.shape
    distances = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().amax(-1)
    return distances.numpy()
