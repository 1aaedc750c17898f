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
    for name, values in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.isfinite(values.float()).all(), name


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"to": "bf16"}, gguf2st.UsageError, "of no use to bf16"),
        ({"to": "fp8", "smoothing": 0.5}, gguf2st.UsageError, "has no integers"),
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
