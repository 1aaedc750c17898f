"""The tensors that a format announces, and the options that it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gguf2st.errors import UsageError
from gguf2st.targets import (
    DTYPE_BYTES,
    Quantized,
    TargetOptions,
    TensorSpec,
    encode_dense,
    target_named,
    target_names,
)
from tests.targets.helpers import DTYPES, matrix

TORCH = {dtype: name for name, (_, dtype) in DTYPES.items()}


@pytest.mark.parametrize("shape", [(40, 256), (128, 128)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ct", {}),
        ("ct", {"bits": 8, "symmetric": False}),
        ("ct", {"group_size": 0, "dtype": "f16"}),
        ("ct", {"group_size": 0, "symmetric": False}),
        ("w8a8", {}),
        ("fp8", {}),
        ("mxfp4", {}),
        ("nvfp4", {}),
    ],
)
def test_modules_as_transformers_builds_them(
    name: str, options: dict[str, Any], shape: tuple[int, int]
) -> None:
    """compressed-tensors turns an nn.Linear into what a checkpoint is loaded into."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    target = target_named(name, TargetOptions(**options))
    with torch.device("meta"):
        model = torch.nn.ModuleDict(
            {
                "down_proj": torch.nn.Linear(shape[1], shape[0], bias=False),
                "lm_head": torch.nn.Linear(shape[1], 8, bias=False),
            }
        ).to(getattr(torch, target.torch_dtype))
    module = Quantized("down_proj", shape, target.schemes()[0])
    config = target.quantization_config([module], ["lm_head"])
    parsed = QuantizationConfig.model_validate(json.loads(json.dumps(config)))
    apply_quantization_config(model, parsed, run_compressed=False)
    with torch.compiler.set_stance("force_eager"):  # compiling would take longer than the rest
        ModelCompressor(quantization_config=parsed).compress_model(model)
    built = {
        TensorSpec(key, TORCH[value.dtype], tuple(value.shape))
        for key, value in model.state_dict().items()
    }
    head = TensorSpec("lm_head.weight", target.dtype, (8, shape[1]))
    assert built == {*target.tensors(module), head}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("awq", {"bits": 8}, "awq takes bits 4, not 8."),
        ("awq", {"group_size": 0}, "awq takes group size 128, 64 or 32, not 0."),
        ("awq", {"dtype": "bf16"}, "awq takes dtype f16, not bf16."),
        ("ct", {"bits": 3}, "compressed-tensors takes bits 4 or 8, not 3."),
        ("ct", {"group_size": 16}, "compressed-tensors takes group size 128, 64, 32 or 0, not 16."),
        ("ct", {"variant": "x"}, "compressed-tensors has no choice of variant; leave it out."),
        ("gptq", {"symmetric": False}, "gptq takes symmetry symmetric, not asymmetric."),
        ("fp8", {"variant": "tensor"}, "fp8 takes variant channel or block, not tensor."),
        ("fp8", {"bits": 4}, "fp8 takes bits 8, not 4."),
        ("w4afp8", {"dtype": "f16"}, "w4afp8 takes dtype bf16, not f16."),
        ("bf16", {"bits": 4}, "bf16 has no choice of bits; leave it out."),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        target_named(name, TargetOptions(**options))
    assert str(raised.value) == message


def test_an_unknown_format_lists_all() -> None:
    with pytest.raises(UsageError, match=r"no output format 'int4'; there are bf16, .*awq"):
        target_named("int4")


@pytest.mark.parametrize("name", target_names())
def test_formats_are_complete(name: str) -> None:
    target = target_named(name)
    assert target.name == name
    assert target.torch_dtype in ("bfloat16", "float16", "float32")
    for scheme in target.schemes():
        assert target.refusal((256, 256), scheme) is None
        module = Quantized("model.layers.0.mlp.experts.7.up_proj", (256, 256), scheme)
        specs = target.tensors(module)
        assert all(spec.dtype in DTYPE_BYTES and spec.shape for spec in specs)
        assert len({spec.name for spec in specs}) == len(specs)
    for module_name in ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.0.up_proj"):
        types = ("Q4_0",) if target.by_type else ()
        assert set(target.schemes_for(module_name, types)) <= set(target.schemes())
        assert bool(target.schemes_for(module_name, types)) == bool(target.schemes())


def test_smaller_groups_only_where_the_size_is_left_open() -> None:
    for name in ("ct", "awq", "gptq"):
        assert [s.group_size for s in target_named(name).schemes()] == [128, 64, 32]
        chosen = target_named(name, TargetOptions(group_size=64))
        assert [s.group_size for s in chosen.schemes()] == [64]


def test_formats_whose_configuration_holds_one_group_size() -> None:
    assert [name for name in target_names() if target_named(name).uniform] == ["awq", "gptq"]


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_dense_rounds_once(dtype: str, kind: torch.dtype) -> None:
    values = matrix(24, 40)
    encoded = encode_dense(TensorSpec("x", dtype, values.shape), values)
    found = torch.frombuffer(bytearray(encoded.tobytes()), dtype=kind).view(values.shape)
    assert torch.equal(found, torch.from_numpy(values).to(kind))
