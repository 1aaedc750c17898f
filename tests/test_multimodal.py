"""A prompt with an image: the output sees what the original and llama.cpp see."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.conversions import Case, cases, converted
from tests.oracles import llama_cpp
from tests.oracles.originals import write_checkpoint

MULTIMODAL = [case for case in cases() if case.mmproj]
PROMPT = "Look: <image> What is it?"
GENERATED = 6
# llama.cpp has the GELU of vision towers and of Gemma in a table of F16 numbers.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Markup:
    """What a family writes around an image; llama.cpp adds `start` and `end` itself."""

    start: str
    token: str
    end: str
    space: str = ""

    def for_transformers(self, count: int) -> str:
        image = f"{self.space}{self.start}{self.token * count}{self.end}{self.space}"
        return PROMPT.replace("<image>", image)

    def for_llama_cpp(self) -> str:
        return PROMPT.replace("<image>", f"{self.space}<image>{self.space}")


QWEN = Markup("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
GEMMA = Markup("<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n\n")


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor  # after the prompt
    tokens: list[int]


def markup(case: Case) -> Markup:
    return GEMMA if case.folder.name.startswith("gemma") else QWEN


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[Markup, Path]:
    """Colour gradients with noise, of a size that no library has to scale: each would its own way."""
    folder = tmp_path_factory.mktemp("pictures")
    return {
        QWEN: draw(folder / "qwen.png", 256, 288),  # whole patches, more than the least area
        GEMMA: draw(folder / "gemma.png", 112, 112),  # the towers of the fixtures
    }


def draw(path: Path, width: int, height: int) -> Path:
    rows, columns = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    noise = np.random.default_rng(0).random((height, width, 3))
    pixels = np.stack([rows, columns, 1 - rows * columns], axis=-1) * 0.7 + noise * 0.3
    Image.fromarray((pixels * 255).astype(np.uint8)).save(path)
    return path


@pytest.mark.parametrize("case", [case for case in MULTIMODAL if case.exact], ids=str)
def test_answers_as_the_original(case: Case, pictures: dict[Markup, Path], tmp_path: Path) -> None:
    picture = pictures[markup(case)]
    original = ask(write_checkpoint(case.folder, tmp_path), markup(case), picture)
    output = ask(converted(case), markup(case), picture)
    # The weights are the same, so every bit of the computation is.
    assert torch.equal(output.logits, original.logits)
    assert output.tokens == original.tokens


@pytest.mark.parametrize("case", MULTIMODAL, ids=str)
def test_sees_what_llama_cpp_sees(case: Case, pictures: dict[Markup, Path], tmp_path: Path) -> None:
    picture = pictures[markup(case)]
    config = transformers.AutoConfig.from_pretrained(converted(case, "f32"))
    mergers = getattr(config.vision_config, "deepstack_visual_indexes", [])
    # llama.cpp ends the process where image features are added to the last layer.
    assert len(mergers) < config.text_config.num_hidden_layers
    output = ask(converted(case, "f32"), markup(case), picture)
    files = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    llama_cpp.requantize_to_f32(case.model, files[0])
    llama_cpp.requantize_to_f32(case.mmproj, files[1])
    logits = llama_cpp.image_logits(*files, picture, markup(case).for_llama_cpp())
    theirs = torch.from_numpy(logits)[: len(output.logits)]
    distance = (output.logits.log_softmax(-1) - theirs.log_softmax(-1)).abs().max()
    assert distance <= TOLERANCE


def ask(directory: Path, family: Markup, picture: Path) -> Answer:
    """Run a checkpoint. Its processor isn't used: Qwen's needs torchvision, for videos."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    network = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32
    )
    processor = transformers.AutoImageProcessor.from_pretrained(directory)
    with Image.open(picture) as opened:
        inputs = dict(processor(images=[opened], return_tensors="pt"))
    if family is QWEN:
        count = int(inputs["image_grid_thw"].prod()) // processor.merge_size**2
        kinds = "mm_token_type_ids"
    else:
        inputs.pop("num_crops", None)
        count, kinds = network.config.mm_tokens_per_image, "token_type_ids"
    inputs["input_ids"] = tokenizer(family.for_transformers(count), return_tensors="pt").input_ids
    image = tokenizer.convert_tokens_to_ids(family.token)
    inputs[kinds] = (inputs["input_ids"] == image).long()
    assert inputs[kinds].sum() == count
    with torch.no_grad():
        logits = network(**inputs).logits[0, -1]
        length = GENERATED
        tokens = network.generate(
            **inputs, max_new_tokens=length, min_new_tokens=length, do_sample=False
        )
    return Answer(logits, tokens[0, inputs["input_ids"].shape[1] :].tolist())
