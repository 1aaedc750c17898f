"""Whole conversions to quantized formats, decoded by others and compared with the plain conversion.

The plain conversion to float32 is proven against llama.cpp's converter and gguf-py elsewhere; here
it is what every quantized checkpoint must be close to.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import gguf2st
from tests.targets import decoders

FIXTURES = Path(__file__).parent.parent / "fixtures"
# Round-to-nearest on Gaussian weights loses about this much (relative RMSE); a wrong nibble order
# or a shifted zero point loses all.
BOUNDS = {
    "awq": 0.13,
    "ct4": 0.13,
    "ct4-asymmetric": 0.13,
    "ct8": 0.012,
    "gptq": 0.13,
    "fp8": 0.04,
    "fp8-block": 0.04,
    "w8a8": 0.02,
    "mxfp4": 0.16,
    "nvfp4": 0.12,
}
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("awq", {}),
    "ct4": ("ct", {}),
    "ct4-asymmetric": ("ct", {"symmetric": False, "group_size": 32}),
    "ct8": ("ct", {"bits": 8, "group_size": 32}),
    "gptq": ("gptq", {}),
    "fp8": ("fp8", {}),
    "fp8-block": ("fp8", {"variant": "block"}),
    "w8a8": ("w8a8", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
}
MODELS = {
    "llama": ("llama/llama-Q4_K_M.gguf", None),
    "qwen35": ("qwen35/qwen35-Q4_K_M.gguf", "qwen35/mmproj-qwen35-f16.gguf"),
    "qwen35moe": ("qwen35moe/qwen35moe-Q4_0.gguf", None),
}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return found


def plain_matrix(plain: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """The matrix of a module in an unquantized checkpoint, also from stacked experts."""
    if f"{name}.weight" in plain:
        return plain[f"{name}.weight"].float().numpy()
    parent, _, rest = name.partition(".experts.")
    number, leaf = rest.split(".")
    if leaf == "down_proj":
        return plain[f"{parent}.experts.down_proj"][int(number)].float().numpy()
    joined = plain[f"{parent}.experts.gate_up_proj"][int(number)].float().numpy()
    gate, up = joined.reshape(2, -1, joined.shape[-1])
    return gate if leaf == "gate_proj" else up


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path | None, dict[str, torch.Tensor]]:
    """A GGUF, its mmproj, and its plain conversion to float32."""
    gguf, mmproj = (FIXTURES / name if name else None for name in MODELS[request.param])
    directory = tmp_path_factory.mktemp(request.param) / "plain"
    gguf2st.convert(gguf, directory, mmproj=mmproj, to="f32")
    return gguf, mmproj, tensors(directory)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_format(model, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, mmproj, plain = model
    target, options = CHOICES[choice]
    report = gguf2st.convert(
        gguf,
        tmp_path / "out",
        mmproj=mmproj,
        to=target,
        target=gguf2st.TargetOptions(**options),
    )
    written = tensors(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert report.modules
    decoded_names = set()
    for module in report.modules:
        wanted = plain_matrix(plain, module.name)
        decoded = decoders.module(written, module.name, config, monkeypatch)
        error = float(np.sqrt(np.square(decoded - wanted).sum() / np.square(wanted).sum()))
        assert error < BOUNDS[choice], module.name
        # What the report says is what an independent decoder finds.
        assert error == pytest.approx(module.relative_rmse, rel=0.02, abs=1e-4), module.name
        assert module.weighted_gain is None or module.weighted_gain >= 1, module.name
        decoded_names |= {f"{module.name}.{leaf}" for leaf in decoders.LEAVES}
    dtype = torch.float16 if target in ("awq", "gptq") else torch.bfloat16
    unquantized = {name: tensor for name, tensor in written.items() if name not in decoded_names}
    for name, tensor in unquantized.items():
        assert torch.equal(tensor.float(), plain[name].to(tensor.dtype).float()), name
        assert tensor.dtype in (dtype, torch.float32), name


def test_mtp_blocks_can_be_dropped(tmp_path: Path) -> None:
    report = gguf2st.convert(
        FIXTURES / MODELS["qwen35"][0], tmp_path / "out", to="ct", drop_mtp=True
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 0
    assert not [name for name in tensors(tmp_path / "out") if name.startswith("mtp.")]
    assert {reason for _, reason in report.dropped} == {"MTP block, left out on request"}


def test_partners_of_a_kept_module_are_kept(tmp_path: Path) -> None:
    report = gguf2st.convert(
        FIXTURES / MODELS["llama"][0], tmp_path / "out", to="ct", keep=(r"layers\.0\..*q_proj",)
    )
    kept = dict(report.kept)
    assert kept["model.layers.0.self_attn.q_proj"] == "kept on request"
    assert "q_proj" in kept["model.layers.0.self_attn.k_proj"]
    quantized = {module.name for module in report.modules}
    assert "model.layers.1.self_attn.q_proj" in quantized
    assert "model.layers.0.self_attn.v_proj" not in quantized


def test_a_head_is_quantized_where_engines_load_it(tmp_path: Path) -> None:
    gguf = FIXTURES / MODELS["llama"][0]
    report = gguf2st.convert(gguf, tmp_path / "ct", to="ct", quantize=("lm_head",))
    assert "lm_head" in {module.name for module in report.modules}
    assert "lm_head.weight_packed" in tensors(tmp_path / "ct")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"].values()
    assert any("re:.*lm_head$" in group["targets"] for group in groups)


def test_schemes_of_a_user_for_some_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q_proj alone is named: the matrices that engines join with it follow."""
    gguf, mmproj = (FIXTURES / str(name) for name in MODELS["qwen35"])
    mixed = (
        ("self_attn.q_proj", "int8-g32"),
        ("self_attn", "int8"),
        ("down_proj", "int4-g64-asym"),
    )
    options = gguf2st.TargetOptions(mixed=mixed)
    report = gguf2st.convert(gguf, tmp_path / "out", mmproj=mmproj, to="ct", target=options)
    schemes = {module.name.partition("layers.")[2]: module.scheme for module in report.modules}
    assert {schemes[f"1.self_attn.{part}_proj"] for part in "qkv"} == {"int8 g32"}
    assert schemes["1.self_attn.o_proj"] == "int8 g128"
    assert schemes["0.mlp.down_proj"] == "int4 asymmetric g64"
    assert schemes["0.mlp.up_proj"] == "int4 g128"
    written = tensors(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 4
    for module in report.modules:
        bits = 8 if "int8" in module.scheme else 4
        columns = written[f"{module.name}.weight_shape"][1]
        assert written[f"{module.name}.weight_packed"].shape[1] == columns * bits // 32


def test_w4afp8_takes_measured_scales_of_activations(tmp_path: Path) -> None:
    gguf = FIXTURES / "qwen3moe" / "qwen3moe-Q4_K_M.gguf"
    measured = "model.layers.0.mlp.experts.1.down_proj"
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps({measured: 0.125}))
    report = gguf2st.convert(
        gguf, tmp_path / "out", to="w4afp8", engines=("sglang",), activation_scales=scales
    )
    written = tensors(tmp_path / "out")
    assert written[f"{measured}.input_scale"].tolist() == [0.125]
    assert written[measured.replace(".1.", ".0.") + ".input_scale"].tolist() == [1]
    assert any("static activation scale 1" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"keep": ("nope",)}, "--keep 'nope' matches no matrix"),
        ({"quantize": ("nope",)}, "--quantize 'nope' matches no matrix"),
        (
            {"target": gguf2st.TargetOptions(mixed=(("nope", "int8"),))},
            "--scheme 'nope' matches no",
        ),
        ({"target": gguf2st.TargetOptions(mixed=(("q", "int3"),))}, "'int3' isn't a scheme"),
        ({"keep": ("(",)}, "isn't a regular expression"),
        (
            {"activation_scales": {"x": 1.0}},
            "--activation-scales are of no use to compressed-tensors",
        ),
    ],
)
def test_choices_that_say_nothing(choices: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = gguf2st.PlanOptions(to="ct", **choices)
    with pytest.raises(gguf2st.UsageError, match=message):
        gguf2st.convert(FIXTURES / MODELS["llama"][0], tmp_path / "out", options=options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("choice", ["ct4", "fp8", "fp8-block", "w8a8", "gptq", "awq"])
def test_a_tied_head_is_unquantized(choice: str, tmp_path: Path) -> None:
    """Engines build it as a linear layer with the embedding's weights, which aren't quantized."""
    target, options = CHOICES[choice]
    gguf2st.convert(
        FIXTURES / "gemma3-vision/gemma3-vision-Q4_K_M.gguf",
        tmp_path / "out",
        to=target,
        target=gguf2st.TargetOptions(**options),
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    listed = config.get("ignore") or config.get("modules_to_not_convert") or config["dynamic"]
    assert any("lm_head" in entry for entry in listed)
    assert "lm_head.weight" not in tensors(tmp_path / "out")


def test_an_importance_matrix_weights_the_columns(tmp_path: Path) -> None:
    """A column of overwhelming weight comes out more exactly than without."""
    gguf = FIXTURES / MODELS["llama"][0]
    importance = np.ones(256, np.float32)
    importance[7] = 1e6
    weights = {f"blk.{n}.ffn_gate.weight": importance for n in range(2)}
    errors = []
    for given in (None, weights):
        out = tmp_path / f"out{given is None}"
        # Folding would move the column's scale.
        gguf2st.convert(gguf, out, to="ct", importance=given, smoothing=0.0 if given else None)
        gguf2st.convert(gguf, tmp_path / "plain", to="f32", force=True)
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        name = "model.layers.0.mlp.gate_proj"
        decoded = decoders.compressed_tensors(decoders.module_tensors(tensors(out), name), config)
        wanted = plain_matrix(tensors(tmp_path / "plain"), name)
        errors.append(float(np.abs(decoded - wanted)[:, 7].mean()))
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize(
    ("gguf", "choices", "message"),
    [
        ("qwen35moe/qwen35moe-Q4_0.gguf", {"to": "awq", "engines": ("hf",)}, "take --to ct, or"),
        (
            "qwen3moe/qwen3moe-Q4_K_M.gguf",
            {
                "to": "ct",
                "engines": ("sglang",),
                "target": gguf2st.TargetOptions(symmetric=False),
            },
            "take --to awq, or",
        ),
        (
            "llama-small/llama-small-bf16.gguf",
            {"to": "awq", "target": gguf2st.TargetOptions(group_size=128)},
            "take --to fp8",
        ),
    ],
)
def test_a_refusal_names_what_works(
    gguf: str, choices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(gguf2st.UnsupportedError, match=message):
        gguf2st.convert(FIXTURES / gguf, tmp_path / "out", **choices)
    assert list(tmp_path.iterdir()) == []
    flags = message.removeprefix("take --to ").partition(",")[0]
    report = gguf2st.convert(
        FIXTURES / gguf, tmp_path / "out", to=flags, engines=choices.get("engines"), dry_run=True
    )
    assert report.schemes


def test_the_command_that_serves_is_one_that_works(tmp_path: Path) -> None:
    gguf = FIXTURES / MODELS["llama"][0]
    report = gguf2st.convert(gguf, tmp_path, to="mxfp4", compute_capability=75, dry_run=True)
    assert report.serve_command == f"transformers serve {tmp_path}"
    assert gguf2st.convert(gguf, tmp_path, dry_run=True).serve_command == f"vllm serve {tmp_path}"
