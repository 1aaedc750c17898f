"""The formulas of parameters agree with the checkpoints that the fixtures were made from."""

import json
from pathlib import Path

import pytest

from gguf2st.verification.expected import FieldError, expected_parameters
from tests.conversions import FIXTURES

# `original.json` lists what transformers' own classes saved, MTP blocks included.
# (NVFP4 fixtures were saved quantized, and one of blocks is no model)
ORIGINAL = sorted(path.parent for path in FIXTURES.glob("*/original.json"))
ORIGINAL = [folder for folder in ORIGINAL if "nvfp4" not in folder.name and folder.name != "blocks"]


def saved(folder: Path) -> dict[str, tuple[int, ...]]:
    tensors = json.loads((folder / "original.json").read_text())["tensors"]
    return {name: tuple(shape) for name, (_, shape) in tensors.items()}


@pytest.mark.parametrize("folder", ORIGINAL, ids=lambda folder: folder.name)
def test_parameters(folder: Path) -> None:
    config, there = json.loads((folder / "config.json").read_text()), saved(folder)
    expected = expected_parameters(config["architectures"][0], config)
    assert expected is not None
    wanted = {p.name: p.shape for p in expected.parameters.values() if not p.optional}
    for block in expected.experts:
        if block.stacked[0][0] in there:
            wanted |= dict(block.stacked)
        else:
            wanted |= {f"{name}.weight": shape for name, shape in block.single()}
    if folder.name.startswith("qwen3next"):  # this family's config can't say that it has none
        wanted = {n: s for n, s in wanted.items() if not n.startswith("mtp.") or n in there}
    assert wanted == {name: shape for name, shape in there.items() if not _quantized(name)}


def _quantized(name: str) -> bool:
    return name.endswith(("_blocks", "_scales"))


@pytest.mark.parametrize("value", [None, "2", -1, True, 10**9])
def test_a_size_that_cant_be(value: object) -> None:
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    with pytest.raises(FieldError, match="num_hidden_layers"):
        expected_parameters("LlamaForCausalLM", config | {"num_hidden_layers": value})


def test_a_class_that_isnt_known() -> None:
    assert expected_parameters("NewForCausalLM", {}) is None
