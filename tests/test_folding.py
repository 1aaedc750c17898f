"""Scales that move from readers to writers leave the function as it is.

The importance matrices here are random and wild, so a reader that a table forgets, or a head that is
taken for another, changes the logits by far more than rounding does.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import gguf2st
from gguf2st.folding import fold_scales
from gguf2st.mapping import resolve
from tests.conversions import FIXTURES, Case, cases, converted, importance, one_per_folder

IDS = torch.arange(3, 51)[None]
# float32 against float32 with other products: measured 3e-6 to 4e-5 on these models.
TOLERANCE = 5e-4
WITH_STACKED_EXPERTS = [
    case
    for case in cases()
    if case.mmproj and case.folder.name in ("qwen3vlmoe-small", "qwen35moe-small")
]


def logits(directory: Path, *, multimodal: bool) -> torch.Tensor:
    auto = (
        transformers.AutoModelForImageTextToText
        if multimodal
        else transformers.AutoModelForCausalLM
    )
    network = auto.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return network(IDS).logits[0].log_softmax(-1)


@pytest.mark.parametrize("case", [*one_per_folder(cases()), *WITH_STACKED_EXPERTS], ids=str)
def test_the_function_stays_the_same(case: Case, tmp_path: Path) -> None:
    model = gguf2st.open_model(case.model, case.mmproj, case.mtp)
    if not resolve(model).folds:
        pytest.skip("the table declares none")
    wild = importance(model)
    gguf2st.convert(
        case.model,
        tmp_path / "folded",
        mmproj=case.mmproj,
        mtp=case.mtp,
        to="f32",
        importance=wild,
        smoothing=0.5,
    )
    folding = fold_scales(resolve(model), wild, 0.5)
    assert folding.folds >= 3  # of a block: before attention, values, feed-forward
    assert not folding.unmeasured
    plain = logits(converted(case, "f32"), multimodal=case.mmproj is not None)
    folded = logits(tmp_path / "folded", multimodal=case.mmproj is not None)
    distances = (plain - folded).abs().amax(-1)
    # With experts, a near tie may go the other way.
    experts = "num_experts_per_tok" in (tmp_path / "folded" / "config.json").read_text("utf-8")
    assert np.quantile(distances.numpy(), 0.9 if experts else 1) <= TOLERANCE


def test_an_expert_that_never_ran_says_nothing_of_the_others() -> None:
    """A matrix without the router's entry: what the experts read is the mean over those that ran."""
    model = gguf2st.open_model(FIXTURES / "qwen3moe" / "qwen3moe-Q4_K_M.gguf")
    small = {name: np.float32(1e-3) * weights for name, weights in importance(model).items()}
    given = {name: small[name] for name in small if "_exps" in name}
    up = given["blk.0.ffn_up_exps.weight"]
    given["blk.0.ffn_gate_exps.weight"] = up
    up[0] = 1
    scales = fold_scales(resolve(model), given, 0.5).column_scales("model.layers.0.mlp.gate")
    wanted = up[1:].astype(np.float64).mean(0) ** 0.25
    assert scales is not None
    np.testing.assert_allclose(scales / scales[0], wanted / wanted[0], rtol=1e-5)


@pytest.fixture(scope="module")
def llama() -> Path:
    return FIXTURES / "llama" / "llama-Q4_K_M.gguf"


def test_the_report_counts_what_was_measured(llama: Path, tmp_path: Path) -> None:
    wild = importance(gguf2st.open_model(llama))
    options = gguf2st.PlanOptions(to="ct", importance=wild)
    report = gguf2st.convert(llama, tmp_path / "out", options=options)
    assert report.folds == 2 * 4
    assert all(module.measured for module in report.modules)
    assert f"imatrix      {len(report.modules)} of" in report.to_text()
    assert not report.imatrix_helps
    for name, values in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.isfinite(values.float()).all(), name


@pytest.mark.parametrize(
    ("name", "options", "folds"),
    [
        ("llama/llama-Q4_K_M.gguf", {"group_size": 32}, 8),
        ("llama/llama-Q4_K_M.gguf", {"bits": 8}, 0),  # rounding what is scaled costs what it brings
        ("blocks/blocks-Q4_0.gguf", {"group_size": 128}, 4),
        ("blocks/blocks-Q4_0.gguf", {"group_size": 32}, 0),
        ("blocks/blocks-TQ1_0.gguf", {"group_size": 128}, 0),
        ("blocks/blocks-Q2_0.gguf", {"group_size": 64, "symmetric": False}, 0),
    ],
)
def test_what_loses_by_scaling_is_not_scaled(
    name: str, options: dict[str, Any], folds: int
) -> None:
    gguf, target = FIXTURES / name, gguf2st.TargetOptions(**options)
    given = {"importance": importance(gguf2st.open_model(gguf)), "to": "ct", "target": target}
    report = gguf2st.convert(gguf, "out", dry_run=True, **given)
    assert report.folds == folds
    plain = gguf2st.convert(gguf, "out", dry_run=True, **given | {"importance": None})
    assert plain.imatrix_helps == bool(folds)  # nor is it missed
    if options.get("bits") == 8:
        assert gguf2st.convert(gguf, "out", dry_run=True, smoothing=0.5, **given).folds == 8


@pytest.mark.parametrize(
    ("choices", "helps"),
    [
        ({"to": "awq"}, True),
        ({"to": "ct", "fit": "rtn"}, False),
        ({"to": "ct", "target": gguf2st.TargetOptions(bits=8)}, False),
        ({"to": "fp8"}, False),
        ({"to": "bf16"}, False),
    ],
)
def test_the_report_says_what_a_matrix_would_bring(
    llama: Path, choices: dict[str, Any], helps: bool
) -> None:
    report = gguf2st.convert(llama, "out", dry_run=True, **choices)
    assert report.imatrix_helps == helps
    assert ("--imatrix FILE" in report.to_text()) == helps


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"to": "bf16"}, gguf2st.UsageError, "of no use to bf16"),
        ({"to": "fp8", "smoothing": 0.5}, gguf2st.UsageError, "has no integers"),
        ({"to": "ct", "smoothing": float("nan")}, gguf2st.UsageError, "isn't an exponent"),
        ({"to": "ct", "smoothing": 0.5, "importance": None}, gguf2st.UsageError, "--imatrix"),
        (
            {"to": "ct", "importance": {"blk.9.ffn_up.weight": np.ones(256, np.float32)}},
            gguf2st.InputError,
            "no entry that fits",
        ),
    ],
)
def test_what_is_of_no_use(
    llama: Path, tmp_path: Path, choices: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"importance": importance(gguf2st.open_model(llama))} | choices
    with pytest.raises(error, match=message):
        gguf2st.convert(llama, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []
