"""A prompt with an image: the output sees what the original and llama.cpp see."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.conversions import Case, cases, converted
from tests.oracles import llama_cpp
from tests.oracles.originals import write_checkpoint

MULTIMODAL = [case for case in cases() if case.mmproj]
GENERATED = 8
# Multiples of a patch and within the processors' limits: nobody has to scale the image, which
# every library does a little differently.
SIZE = (256, 320)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth colour gradients with some noise."""
    rows, columns = np.mgrid[0:1:SIZE[1] * 1j, 0:1:SIZE[0] * 1j]
    noise = np.random.default_rng(0).random((*rows.shape, 3))
    pixels = np.stack([rows, columns, 1 - rows * columns], axis=-1) * 0.7 + noise * 0.3
    path = tmp_path_factory.mktemp("image") / "image.png"
    Image.fromarray((pixels * 255).astype(np.uint8)).save(path)
    return path


@pytest.mark.parametrize("case", [case for case in MULTIMODAL if case.exact], ids=str)
def test_says_the_same_about_an_image_as_the_original(
    case: Case, image: Path, tmp_path: Path
) -> None:
    original = run(write_checkpoint(case.folder, tmp_path), image)
    output = run(converted(case), image)
    assert output["tokens"] == original["tokens"]
    assert torch.equal(output["logits"], original["logits"])


@pytest.mark.parametrize("case", MULTIMODAL, ids=str)
def test_sees_what_llama_cpp_sees(case: Case, image: Path, tmp_path: Path) -> None:
    output = run(converted(case, "f32"), image)
    model, projector = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    llama_cpp.requantize_to_f32(case.model, model)
    llama_cpp.requantize_to_f32(case.mmproj, projector)
    # llama.cpp adds the markers around the image itself.
    prompt = output["prompt"].replace(output["placeholder"], "<image>")
    theirs = torch.from_numpy(llama_cpp.image_logits(model, projector, image, prompt))
    difference = output["logits"].log_softmax(-1) - theirs.log_softmax(-1)
    print("FIG", case, difference.abs().max())
    assert difference.abs().max() <= 0.05
    tokens = llama_cpp.image_generate(model, projector, image, prompt, GENERATED)
    assert output["tokens"] == tokens


def run(directory: Path, image: Path) -> dict[str, Any]:
    """Ask a checkpoint about an image: the prompt, its last logits and the likeliest answer."""
    processor = transformers.AutoProcessor.from_pretrained(directory)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True)
    with Image.open(image) as opened:
        inputs = processor(text=[prompt], images=[opened], return_tensors="pt")
    network = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32
    )
    with torch.no_grad():
        logits = network(**inputs).logits[0, -1]
        answer = network.generate(**inputs, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False)
    start = inputs["input_ids"].shape[1]
    return {
        "prompt": prompt,
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
        "logits": logits,
        "tokens": answer[0, start:].tolist(),
    }
