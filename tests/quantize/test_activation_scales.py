"""Files of static activation scales, and files that are none."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gguf2st.errors import InputError
from gguf2st.quantize.activation_scales import read_activation_scales

UP = "model.layers.0.mlp.experts.0.up_proj"


def test_json(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text(json.dumps({UP: 0.5, "x.input_scale": 2}))
    assert read_activation_scales(file) == {UP: 0.5, "x": 2.0}


def test_safetensors_of_a_whole_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    tensors = {f"{UP}.input_scale": np.float32([0.25]), f"{UP}.weight": np.zeros((2, 2), np.int8)}
    save_file(tensors, file)
    assert read_activation_scales(file) == {UP: 0.25}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "JSON object"),
        ("{", "JSON object"),
        ('{"x": "y"}', "JSON object"),
        ("{}", "holds no activation scales"),
        ('{"x": 0}', "activation scale of x in .* is 0.0"),
        ('{"x": NaN}', "is nan"),
    ],
)
def test_what_is_no_file_of_scales(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "scales.json"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_activation_scales(file)


def test_what_is_no_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    file.write_text("{}")
    with pytest.raises(InputError, match="can't be read as safetensors"):
        read_activation_scales(file)
    with pytest.raises(InputError, match="can't be read"):
        read_activation_scales(tmp_path / "nothing.json")
