"""gpt-oss in the layout it was published in: stacked experts in MXFP4, everything else in bfloat16."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import gguf2st
from gguf2st.errors import InputError, UnsupportedError, UsageError
from tests.conversions import Case, cases, converted, load
from tests.oracles import ggml
from tests.oracles.gguf_rewrite import Tensor, rewrite
from tests.oracles.originals import original_state_dict
from tests.test_round_trip import decode_mxfp4

CASES = {case.model.name: case for case in cases()}
PUBLISHED = CASES["gptoss-small-mxfp4.gguf"]
DENSE = CASES["gptoss-small-dense-bf16.gguf"]
QUANTIZED = CASES["gptoss-small-dense-Q5_0.gguf"]
STACKS = [
    f"model.layers.{block}.mlp.experts.{kind}_proj"
    for block in (0, 1)
    for kind in ("gate_up", "down")
]
_F32 = 0  # enum ggml_type
# Round to nearest of Gaussian weights on a grid of E2M1 loses 0.11.
BOUND = 0.13


def unpacked(written: dict[str, torch.Tensor], stack: str) -> torch.Tensor:
    """Values (expert, out, in) as transformers decodes them."""
    blocks, scales = written[f"{stack}_blocks"], written[f"{stack}_scales"]
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_published_checkpoint_comes_back_byte_for_byte() -> None:
    original, written = original_state_dict(PUBLISHED.folder), load(converted(PUBLISHED, "mxfp4"))
    assert written.keys() == original.keys()
    assert {f"{stack}_{leaf}" for stack in STACKS for leaf in ("blocks", "scales")} < written.keys()
    for name, tensor in original.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(written[name], tensor), name


def test_config_is_the_published_one() -> None:
    original, written = (
        json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
        for folder in (PUBLISHED.folder, converted(PUBLISHED, "mxfp4"))
    )
    for config in (original, written):
        config["modules_to_not_convert"].sort()
    assert written == original


def test_the_report_says_exact(tmp_path: Path) -> None:
    report = gguf2st.convert(PUBLISHED.model, tmp_path / "out", to="mxfp4")
    assert {module.name for module in report.modules} == set(STACKS)
    assert all(module.exact and module.relative_rmse == 0 for module in report.modules)
    assert {module.source for module in report.modules} == {"MXFP4"}
    assert "4 of 4 matrices exact" in report.to_text()


def test_any_number_of_threads_and_any_piece_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gguf2st.run.CHUNK_ELEMENTS", 7 * 64)
    monkeypatch.setattr("gguf2st.run.DIRECT_ELEMENTS", 7 * 64)
    for case in (PUBLISHED, QUANTIZED):
        out = tmp_path / case.model.stem
        gguf2st.convert(case.model, out, to="mxfp4", threads=5)
        whole = converted(case, "mxfp4") / "model.safetensors"
        assert (out / "model.safetensors").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("case", [DENSE, QUANTIZED], ids=str)
def test_other_experts_are_quantized_to_the_same_layout(case: Case, tmp_path: Path) -> None:
    report = gguf2st.convert(case.model, tmp_path / "out", to="mxfp4")
    written, plain = load(tmp_path / "out"), load(converted(case, "f32"))
    published = load(converted(PUBLISHED, "mxfp4"))
    assert {n: (t.dtype, t.shape) for n, t in written.items()} == {
        n: (t.dtype, t.shape) for n, t in published.items()
    }
    errors = {module.name: module.relative_rmse for module in report.modules}
    for stack in STACKS:
        found = relative_error(unpacked(written, stack), plain[stack].mT)
        assert found < BOUND
        assert errors[stack] == pytest.approx(found, rel=1e-4)
    for name in written.keys() & plain.keys():
        assert torch.equal(written[name], plain[name].bfloat16()), name


def test_values_on_the_grid_stay_where_the_blocks_differ(tmp_path: Path) -> None:
    """With gate in MXFP4 and up in F32 the blocks can't be moved, but their values can."""

    def decode_up(tensor: Tensor) -> Tensor:
        if "ffn_up_exps.weight" not in tensor.name:
            return tensor
        values = ggml.dequantize("MXFP4", tensor.data, tensor.count)
        return Tensor(tensor.name, tensor.shape, _F32, values.tobytes())

    rewrite(PUBLISHED.model, tmp_path / "mixed.gguf", decode_up)
    report = gguf2st.convert(tmp_path / "mixed.gguf", tmp_path / "out", to="mxfp4")
    assert all(module.exact for module in report.modules)
    written, original = load(tmp_path / "out"), decode_mxfp4(original_state_dict(PUBLISHED.folder))
    for stack in STACKS:
        assert torch.equal(unpacked(written, stack), original[stack].float().mT)


def test_every_expert_has_its_own_importance(tmp_path: Path) -> None:
    """A column of overwhelming weight in one expert comes out more exactly in that one."""
    importance = np.ones((4, 64), np.float32)
    importance[2, 7] = 1e6
    weights = {f"blk.0.ffn_{kind}_exps.weight": importance for kind in ("gate", "up")}
    plain = load(converted(DENSE, "f32"))[STACKS[0]].mT
    found = {}
    for given in (None, weights):
        out = tmp_path / str(given is None)
        gguf2st.convert(DENSE.model, out, to="mxfp4", importance=given)
        difference = (unpacked(load(out), STACKS[0]) - plain).abs()
        found[given is None] = difference[:, :, 7].mean(1)
    weighted, even = found[False], found[True]
    assert weighted[2] < even[2]
    assert torch.equal(weighted[[0, 1, 3]], even[[0, 1, 3]])


@pytest.mark.parametrize("case", [PUBLISHED, QUANTIZED], ids=str)
def test_transformers_unpacks_it(case: Case) -> None:
    """It loads all of it, and has the numbers that an unquantized conversion has."""
    network, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        converted(case, "mxfp4"),
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    written = load(converted(case, "mxfp4"))
    state = network.state_dict()
    for stack in STACKS:
        assert torch.equal(state[stack].float(), unpacked(written, stack).mT)
    if case is PUBLISHED:
        plain = load(converted(case))
        assert state.keys() == plain.keys()
        assert not [name for name in plain if not torch.equal(state[name], plain[name])]


def test_transformers_loads_the_unquantized_conversion() -> None:
    _, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        converted(PUBLISHED), dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["awq", "ct", "gptq", "fp8", "w8a8", "nvfp4", "w4afp8"])
def test_formats_that_engines_do_not_read_in_common(target: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"stacked and have biases.*--to mxfp4 or --to bf16"):
        gguf2st.convert(PUBLISHED.model, tmp_path / "out", to=target)


def test_choices_that_the_layout_does_not_have(tmp_path: Path) -> None:
    def convert(case: Case, **choices: object) -> None:
        gguf2st.convert(case.model, tmp_path / "out", to="mxfp4", **choices)

    with pytest.raises(UnsupportedError, match="variant compressed"):
        convert(PUBLISHED, target=gguf2st.TargetOptions(variant="compressed"))
    with pytest.raises(UsageError, match="dtype bf16, not f16"):
        convert(PUBLISHED, target=gguf2st.TargetOptions(dtype="f16"))
    with pytest.raises(UnsupportedError, match="same modules of all blocks"):
        convert(PUBLISHED, keep=(r"layers\.0\..*experts",))
    with pytest.raises(UnsupportedError, match="stacked experts alone"):
        convert(
            CASES["qwen3moe-small-bf16.gguf"],
            target=gguf2st.TargetOptions(variant="native"),
        )


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    def spoil(tensor: Tensor) -> Tensor:
        if tensor.name != "blk.1.ffn_down_exps.weight":
            return tensor
        return Tensor(tensor.name, tensor.shape, tensor.code, b"\xff" + tensor.data[1:])

    rewrite(PUBLISHED.model, tmp_path / "broken.gguf", spoil)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts\.down_proj .* scale 2\^128"):
        gguf2st.convert(tmp_path / "broken.gguf", tmp_path / "out", to="mxfp4")
