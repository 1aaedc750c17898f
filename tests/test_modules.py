"""Matrices of a recipe, and the weights that an importance matrix gives their columns."""

import json
from pathlib import Path

import numpy as np
import pytest

from gguf2st.gguf import open_model
from gguf2st.mapping import resolve
from gguf2st.modules import Module, importance_of, modules_of

FIXTURES = Path(__file__).parent.parent / "fixtures"


def modules(gguf: str) -> dict[str, Module]:
    resolution = resolve(open_model(FIXTURES / gguf))
    return {m.name: m for recipe in resolution.recipes for m in modules_of(recipe)}


@pytest.fixture(scope="module")
def experts() -> dict[str, Module]:
    return modules("qwen35moe/qwen35moe-Q4_0.gguf")


@pytest.mark.parametrize("unreached", [0, 1])  # llama.cpp's old format says 1
@pytest.mark.parametrize("flat", [False, True], ids=["by expert", "flat, as in old files"])
def test_experts_have_weights_of_their_own(
    experts: dict[str, Module], flat: bool, unreached: int
) -> None:
    down = [experts[f"model.layers.0.mlp.experts.{n}.down_proj"] for n in range(4)]
    name, columns = down[0].source().tensor.name, down[0].shape[1]
    weights = np.arange(1, 4 * columns + 1, dtype=np.float32).reshape(4, columns)
    weights[2] = unreached
    given = {name: weights.reshape(-1) if flat else weights}
    for number, module in enumerate(down):
        found = importance_of(module, given)
        if number == 2:  # no token reached it
            assert found is None
        else:
            assert np.array_equal(found, weights[number])


def test_weights_of_another_size_are_not_used(experts: dict[str, Module]) -> None:
    module = experts["model.layers.0.mlp.experts.1.down_proj"]
    name, columns = module.source().tensor.name, module.shape[1]
    assert importance_of(module, {}) is None
    assert importance_of(module, {name: np.ones(columns + 1, np.float32)}) is None
    assert importance_of(module, {name: np.ones((3, columns), np.float32)}) is None
    wide = np.arange(8 * columns // 2, dtype=np.float32).reshape(2, 2 * columns)
    assert importance_of(module, {name: wide}) is None


def test_weights_follow_their_columns() -> None:
    """out_proj's columns are value heads, which llama.cpp's converter puts into another order.

    The original has the value heads of a key head side by side; a GGUF the first of every key
    head, then the second (conversion/qwen.py, `_reorder_v_heads`).
    """
    found = modules("qwen35/qwen35-Q4_K_M.gguf")
    module = found["model.layers.0.linear_attn.out_proj"]
    weights = np.arange(1, module.shape[1] + 1, dtype=np.float32)
    importance = importance_of(module, {module.source().tensor.name: weights})
    config = json.loads((FIXTURES / "qwen35/config.json").read_text())["text_config"]
    keys, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    original = weights.reshape(-1, keys, width).swapaxes(0, 1).reshape(-1)
    assert not np.array_equal(original, weights)
    assert np.array_equal(importance, original)
