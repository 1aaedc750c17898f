"""Every matrix gets the importance that its columns have when transformers runs the model.

The files under fixtures/importance are llama-imatrix's, of fixtures with experts and of the text that
their tokenizers were trained on (256 tokens a row).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import gguf2st
from gguf2st.gguf import open_model
from gguf2st.mapping import resolve
from gguf2st.modules import importance_of, modules_of
from gguf2st.quantize import read_importance

FIXTURES = Path(__file__).parent.parent / "fixtures"
MODELS = {
    "qwen3moe": "qwen3moe-Q4_K_M.gguf",
    "qwen35moe": "qwen35moe-Q4_0.gguf",
    "qwen3next": "qwen3next-Q3_K_M.gguf",
    "mixtral": "mixtral-Q4_K_M.gguf",
}
ROW = 256
# Published Mixtral checkpoints keep the names of the first release.
OLD_NAMES = (
    ("mlp", "block_sparse_moe"),
    ("gate_proj", "w1"),
    ("down_proj", "w2"),
    ("up_proj", "w3"),
)


def mean_squares(checkpoint: Path) -> dict[str, np.ndarray]:
    """What each linear layer and each expert is multiplied with, measured by hooks."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.set_experts_implementation("eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    sums: dict[str, tuple[torch.Tensor, int]] = {}

    def add(name: str, values: torch.Tensor) -> None:
        values = values.reshape(-1, values.shape[-1])
        before, count = sums.get(name, (torch.zeros(values.shape[-1]), 0))
        sums[name] = before + values.square().sum(0), count + len(values)

    def of_experts(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            states, chosen = inputs[0].reshape(-1, inputs[0].shape[-1]), inputs[1]
            for expert in range(module.num_experts):
                mine = states[(chosen == expert).any(-1)]
                gate, up = (mine @ module.gate_up_proj[expert].T).chunk(2, -1)
                for part, values in (
                    ("gate", mine),
                    ("up", mine),
                    ("down", module.act_fn(gate) * up),
                ):
                    add(f"{name}.{expert}.{part}_proj", values)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or name.endswith(".gate"):
            module.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0]))
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(of_experts(name))
    ids = tokenizer((FIXTURES / "corpus.txt").read_text("utf-8"), return_tensors="pt").input_ids
    rows = ids[0, : ids.shape[1] // ROW * ROW].reshape(-1, ROW)[:8]
    if tokenizer.bos_token_id is not None and ids[0, 0] == tokenizer.bos_token_id:
        rows[:, 0] = tokenizer.bos_token_id  # as llama-imatrix begins each row
    with torch.no_grad():
        model(rows)
    if model.config.model_type == "mixtral":
        for new, old in OLD_NAMES:
            sums = {name.replace(new, old): found for name, found in sums.items()}
    return {name: (total / count).numpy() for name, (total, count) in sums.items() if count}


@pytest.mark.parametrize("family", MODELS)
def test_columns_of_experts(family: str, tmp_path: Path) -> None:
    gguf = FIXTURES / family / MODELS[family]
    gguf2st.convert(gguf, tmp_path / "plain", to="f32")
    wanted = mean_squares(tmp_path / "plain")
    modules = [m for recipe in resolve(open_model(gguf)).recipes for m in modules_of(recipe)]
    for form in ("gguf", "dat"):
        importance = read_importance(FIXTURES / f"importance/{family}.imatrix.{form}")
        found = {module.name: importance_of(module, importance) for module in modules}
        measured = {name for name, weights in found.items() if weights is not None}
        assert measured == wanted.keys() - {"lm_head"}  # llama-imatrix leaves the head out
        for name in measured:
            weights = np.log(wanted[name])
            # Columns differ by far more than what llama.cpp's rounding of activations to 8 bits, and
            # the few tokens whose router was nearly undecided, make of one.
            assert weights.std() > 0.25, name
            np.testing.assert_allclose(np.log(found[name]), weights, rtol=0, atol=0.12)
