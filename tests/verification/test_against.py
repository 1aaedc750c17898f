"""Checkpoints compared with GGUFs: right ones agree, and what is wrong is found and named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import gguf2st
from gguf2st.cli import app
from gguf2st.verification import Finding, VerifyReport
from gguf2st.verification.against import families, measuring
from tests.conversions import FIXTURES, Case, cases, converted, importance, load
from tests.oracles.originals import write_checkpoint
from tests.verification.editing import Edit, opened

CASES = {str(case): case for case in cases()}
QWEN35 = "qwen35-small-bf16-fused-qkv+mmproj-qwen35-small-bf16"
QWEN35_DRAFT = "qwen35-small-bf16-no-mtp+mtp-qwen35-small-bf16"
QWEN35_QUANTIZED = "qwen35-IQ4_XS+mmproj-qwen35-f16"
GEMMA3 = "gemma3-vision-small-bf16+mmproj-gemma3-vision-small-bf16"
QWEN3VL = "qwen3vlmoe-small-bf16+mmproj-qwen3vlmoe-small-bf16"
OTHERS = ("gptoss-small-mxfp4", "gptoss-small-dense-Q5_0", "qwen3next-Q3_K_M", "qwen3-small-nvfp4")
LLAMA, QWEN3MOE = "llama-Q4_K_M", "qwen3moe-Q4_K_M"
# Leaves of a quantized module; it is compared under the name of its weight.
LEAVES = (
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point"),
    *("weight_global_scale", "input_scale", "input_global_scale"),
    *("qweight", "qzeros", "scales", "g_idx"),
)


def compared(directory: Path, case: Case) -> VerifyReport:
    return gguf2st.verify(directory, against=case.model, mmproj=case.mmproj, mtp=case.mtp)


def about_values(report: VerifyReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule.startswith("A-")]


def names_of(directory: Path) -> set[str]:
    """What a checkpoint holds, whatever it is stored in."""
    found = set()
    for name in load(directory):
        module, _, leaf = name.rpartition(".")
        found.add(f"{module}.weight" if leaf in LEAVES else name)
    return {name.removesuffix("_blocks").removesuffix("_scales") for name in found}


def assert_all_agree(report: VerifyReport, directory: Path, agreements: set[str]) -> None:
    assert report.against is not None and not report.against.left_out
    assert {f.agreement for f in report.against.figures} == agreements
    assert {f.name.partition("[")[0] for f in report.against.figures} == names_of(directory)
    assert not [f for f in about_values(report) if f.fatal]


@pytest.mark.parametrize(
    ("name", "to"),
    [(name, "bf16") for name in (QWEN35, QWEN35_DRAFT, GEMMA3, QWEN3VL, *OTHERS)]
    + [
        (name, to)
        for name in (LLAMA, QWEN35_QUANTIZED, QWEN3MOE)
        for to in ("ct", "awq", "gptq", "fp8")
    ]
    + [(LLAMA, to) for to in ("nvfp4", "mxfp4", "w8a8")]
    + [(QWEN3MOE, "w4afp8"), ("gemma3-vision-Q4_K_M", "ct"), ("mixtral-Q4_K_M", "awq")],
)
def test_conversions_agree(name: str, to: str) -> None:
    case = CASES[name]
    report = compared(converted(case, to), case)
    assert_all_agree(report, converted(case, to), {"same"})
    assert not about_values(report)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, case in CASES.items()
        if case.exact and "nvfp4" not in name and case.folder.name != "blocks"
    ],
)
def test_what_llama_cpp_converted_agrees_with_what_it_converted(name: str, tmp_path: Path) -> None:
    """Nothing of ours was between the two: this proves the tables of families."""
    case = CASES[name]
    directory = write_checkpoint(case.folder, tmp_path / "original")
    report = compared(directory, case)
    assert report.against is not None
    assert {f.agreement for f in report.against.figures} == {"same"}
    assert not about_values(report)
    missing = names_of(directory) - {f.name.partition("[")[0] for f in report.against.figures}
    vision = ("model.visual.", "vision_tower.", "multi_modal_projector.")
    without = (() if case.mmproj else vision) + (() if case.has_mtp else ("mtp.",))
    assert all(name.startswith(without) for name in missing)
    assert bool(missing) == bool(report.against.left_out)


@pytest.mark.parametrize("name", [LLAMA, "qwen3next-Q3_K_M", "qwen35moe-Q4_0", "gemma2-Q4_K_M"])
def test_the_original_of_a_quantized_file_is_rounded_apart(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    report = compared(write_checkpoint(case.folder, tmp_path / "original"), case)
    assert {f.rule for f in about_values(report)} == {"A-03"}
    assert report.against is not None
    exact = {f.agreement for f in report.against.figures if f.kind == "F32"}
    assert exact == {"same"}  # where the GGUF isn't rounded, nothing is excused


@pytest.mark.parametrize(
    ("name", "to"),
    [
        (LLAMA, "ct"),
        (QWEN35_QUANTIZED, "awq"),
        (QWEN35_QUANTIZED, "f32"),
        ("qwen2moe-MXFP4_MOE", "gptq"),
        ("gemma2-Q4_K_M", "ct"),
    ],
)
def test_scales_that_moved_are_moved_back(name: str, to: str, tmp_path: Path) -> None:
    case = CASES[name]
    directory = tmp_path / "scaled"
    gguf2st.convert(
        case.model,
        directory,
        mmproj=case.mmproj,
        to=to,
        importance=importance(gguf2st.open_model(case.model)),
        smoothing=0.5,
    )
    report = compared(directory, case)
    assert_all_agree(report, directory, {"same", "scaled"})
    assert [f.rule for f in about_values(report)] == ["A-04"]
    (note,) = report.of("A-04")
    assert any(name.endswith("norm.weight") for name in note.subjects)
    assert any("down_proj" in name for name in note.subjects)


def test_a_wrong_matrix_among_scaled_ones_is_found(tmp_path: Path) -> None:
    case = CASES[LLAMA]
    values = importance(gguf2st.open_model(case.model))
    gguf2st.convert(case.model, tmp_path / "scaled", to="ct", importance=values)
    edit = opened(tmp_path / "scaled")
    wrong = "model.layers.0.self_attn.q_proj"
    edit.tensors[f"{wrong}.weight_packed"] = edit.tensors[f"{wrong}.weight_packed"].flip(0)
    report = compared(edit.write(tmp_path / "broken", tmp_path / "scaled"), case)
    (finding,) = report.of("A-01")
    assert finding.subjects == (f"{wrong}.weight",)


def two_rows(edit: Edit) -> list[str]:
    name = "model.layers.1.mlp.down_proj.weight"
    edit.tensors[name][[3, 7]] = edit.tensors[name][[7, 3]]
    return [name]


def two_packed_rows(edit: Edit) -> list[str]:
    """Two of 256 rows: an error of the whole tensor within what int4 explains."""
    module = "model.layers.1.mlp.down_proj"
    for leaf in ("weight_packed", "weight_scale"):
        edit.tensors[f"{module}.{leaf}"][[3, 7]] = edit.tensors[f"{module}.{leaf}"][[7, 3]]
    return [f"{module}.weight"]


def rows_not_put_back(edit: Edit) -> list[str]:
    """As llama.cpp stores queries of Llama."""
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = edit.tensors[name]
    heads = edit.config["num_attention_heads"]
    edit.tensors[name] = rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    return [name]


def doubled_scales(edit: Edit) -> list[str]:
    edit.tensors["model.layers.1.mlp.down_proj.weight_scale"] *= 2
    return ["model.layers.1.mlp.down_proj.weight"]


def doubled_row_scale(edit: Edit) -> list[str]:
    """One that could be a fold, if what reads it had changed, too."""
    edit.tensors["model.layers.1.mlp.up_proj.weight_scale"][5] *= 2
    return ["model.layers.1.mlp.up_proj.weight"]


def gate_and_up(edit: Edit) -> list[str]:
    names = [f"model.layers.0.mlp.{which}_proj.weight" for which in ("gate", "up")]
    one, other = names
    edit.tensors[one], edit.tensors[other] = edit.tensors[other], edit.tensors[one]
    return names


def layers(edit: Edit) -> list[str]:
    def other(name: str) -> str:
        return name.translate(str.maketrans("01", "10")) if ".layers." in name else name

    edit.tensors = {other(name): tensor for name, tensor in edit.tensors.items()}
    return edit.names("model.layers.0.") + edit.names("model.layers.1.")


def experts(edit: Edit) -> list[str]:
    names = [f"model.layers.0.mlp.experts.{number}.down_proj.weight" for number in (0, 2)]
    one, other = names
    edit.tensors[one], edit.tensors[other] = edit.tensors[other], edit.tensors[one]
    return names


def the_one(edit: Edit) -> list[str]:
    name = edit.names("layers.0.input_layernorm.weight")[0]
    edit.tensors[name] = edit.tensors[name].float() + 1
    return [name]


def value_heads(edit: Edit) -> list[str]:
    """Of one matrix, and not as anyone would store them."""
    (name,) = edit.names("layers.0.linear_attn.in_proj_z.weight")
    heads, rows = edit.text["linear_num_value_heads"], edit.tensors[name]
    edit.tensors[name] = rows.view(heads, -1, rows.shape[1]).flip(0).reshape(rows.shape)
    return [name]


def decays(edit: Edit) -> list[str]:
    (name,) = edit.names("layers.0.linear_attn.A_log")
    edit.tensors[name] = -edit.tensors[name].exp()
    return [name]


def frames(edit: Edit) -> list[str]:
    (name,) = edit.names("visual.patch_embed.proj.weight")
    edit.tensors[name] = edit.tensors[name].flip(2)
    return [name]


def narrower(edit: Edit) -> list[str]:
    (name,) = edit.names("mtp.fc.weight")
    edit.tensors[name] = edit.tensors[name][:, ::2]
    return [name]


BROKEN: list[tuple[str, str, Callable[[Edit], list[str]], str]] = [
    (LLAMA, "bf16", two_rows, "2 of 256"),
    (LLAMA, "ct", two_packed_rows, "2 of 256"),
    (LLAMA, "bf16", rows_not_put_back, "rows are there in another order"),
    (LLAMA, "ct", doubled_scales, "2 times"),
    (LLAMA, "ct", doubled_row_scale, "1 of 256"),
    (LLAMA, "bf16", gate_and_up, "gate_proj.weight holds model.layers.0.mlp.up_proj.weight"),
    (LLAMA, "bf16", layers, "holds model.layers"),
    (QWEN3MOE, "bf16", experts, "holds model.layers.0.mlp.experts"),
    (GEMMA3, "bf16", the_one, "[+]1 off"),
    (QWEN35, "bf16", the_one, "[+]1 off"),
    (QWEN35, "bf16", value_heads, "order"),
    (QWEN35, "bf16", decays, ""),
    (QWEN35, "bf16", frames, ""),
    (QWEN35, "bf16", narrower, "shape"),
]


@pytest.mark.parametrize(
    ("name", "to", "change", "reason"), BROKEN, ids=lambda x: getattr(x, "__name__", "")
)
def test_what_is_wrong_is_named(
    name: str, to: str, change: Callable[[Edit], list[str]], reason: str, tmp_path: Path
) -> None:
    case = CASES[name]
    edit = opened(converted(case, to))
    changed = change(edit)
    report = compared(edit.write(tmp_path / "broken", converted(case, to)), case)
    found = report.of("A-01")
    assert {subject for f in found for subject in f.subjects} == set(changed)
    assert all(f.fatal for f in found) and not report.right
    assert any(re.search(reason, f.reason) for f in found), [f.reason for f in found]


def reordered(edit: Edit, how: str) -> list[str]:
    """Value heads of the first block of Qwen3.5 or Qwen3-Next, wherever they are, in another order."""
    keys, values = edit.text["linear_num_key_heads"], edit.text["linear_num_value_heads"]
    head, key = edit.text["linear_value_head_dim"], edit.text["linear_key_head_dim"]
    shape = (keys, values // keys) if how == "tiled" else (values // keys, keys)

    def turned(rows: torch.Tensor) -> torch.Tensor:
        """Heads along the first axis."""
        return rows.reshape(*shape, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    def behind(rows: torch.Tensor, kept: int) -> torch.Tensor:
        return torch.cat((rows[:kept], turned(rows[kept:])))

    names = edit.names("layers.0.linear_attn.")
    changed = []
    for name in names:
        tensor, leaf = edit.tensors[name], name.partition("linear_attn.")[2]
        if leaf in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            tensor = turned(tensor)
        elif leaf in ("in_proj_qkv.weight", "conv1d.weight"):
            tensor = behind(tensor, 2 * keys * key)
        elif leaf == "out_proj.weight":
            tensor = turned(tensor.T.contiguous()).T
        elif leaf == "in_proj_qkvz.weight":  # of each key head q, k, its values, its gates
            parts = tensor.view(keys, -1, tensor.shape[1])
            kept, rest = parts[:, : 2 * key], parts[:, 2 * key :]
            rest = rest.reshape(keys, 2, -1, tensor.shape[1]).transpose(0, 1)
            rest = torch.stack([turned(part.reshape(values * head, -1)) for part in rest])
            rest = (
                rest.view(2, keys, -1, tensor.shape[1])
                .transpose(0, 1)
                .reshape(keys, -1, tensor.shape[1])
            )
            tensor = torch.cat((kept, rest), 1).reshape(tensor.shape)
        else:
            continue
        if not torch.equal(tensor, edit.tensors[name]):
            changed.append(name)
        edit.tensors[name] = tensor.contiguous()
    return changed


@pytest.mark.parametrize(
    ("name", "count"), [(QWEN35, 8), ("qwen3next-Q3_K_M", 5)], ids=["qwen35", "qwen3next"]
)
@pytest.mark.parametrize("how", ["tiled", "twice"])
def test_value_heads_in_another_order(name: str, count: int, how: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert not compared(converted(case, "bf16"), case).of("D-41")
    edit = opened(converted(case, "bf16"))
    changed = reordered(edit, how)
    report = compared(edit.write(tmp_path / "broken", converted(case, "bf16")), case)
    found = report.of("D-41")
    assert {subject for f in found for subject in f.subjects} == set(changed) and len(
        changed
    ) == count
    assert all(("are tiled" if how == "tiled" else "once too often") in f.reason for f in found)
    assert all(f.fatal for f in found) and not report.right and not report.of("A-01")


def test_modelopt(tmp_path: Path) -> None:
    """Its NVFP4 names codes differently and multiplies with what compressed-tensors divides by."""
    case = CASES[LLAMA]
    edit = opened(converted(case, "nvfp4"))
    for name in edit.names("weight_packed"):
        module = name.removesuffix(".weight_packed")
        edit.tensors[f"{module}.weight"] = edit.tensors.pop(name)
        shared = edit.tensors.pop(f"{module}.weight_global_scale")
        edit.tensors[f"{module}.weight_scale_2"] = (1 / shared).reshape(())
        edit.tensors.pop(f"{module}.input_global_scale", None)
    edit.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    report = compared(edit.write(tmp_path / "modelopt", converted(case, "nvfp4")), case)
    assert report.against is not None and not report.against.left_out
    assert {f.agreement for f in report.against.figures} == {"same"} and not about_values(report)
    assert any(f.scheme.startswith("nvfp4") for f in report.against.figures)
    edit.tensors["model.layers.1.mlp.down_proj.weight_scale_2"] *= 2
    report = compared(edit.write(tmp_path / "broken", converted(case, "nvfp4")), case)
    assert "2 times" in report.of("A-01")[0].reason


@pytest.mark.parametrize("where", ["there", "here"])
def test_no_counterpart(where: str, tmp_path: Path) -> None:
    case = CASES[LLAMA]
    edit = opened(converted(case, "bf16"))
    if where == "there":
        edit.drop("layers.1.mlp.up_proj.weight")
        expected = "blk.1.ffn_up.weight"
    else:
        expected = "model.layers.1.mlp.up_proj.bias"
        edit.tensors[expected] = torch.ones(256)
    report = compared(edit.write(tmp_path / "broken", converted(case, "bf16")), case)
    (finding,) = report.of("A-02")
    assert finding.subjects == (expected,) and finding.fatal


def test_a_size_that_config_json_gives_wrong(tmp_path: Path) -> None:
    case = CASES[QWEN35]
    edit = opened(converted(case, "bf16"))
    edit.text["linear_num_key_heads"] = 3
    report = compared(edit.write(tmp_path / "broken", converted(case, "bf16")), case)
    assert all("3 key and 8 value heads" in f.reason for f in report.of("A-02"))
    assert any("A_log" in name for f in report.of("A-02") for name in f.subjects)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[QWEN35_QUANTIZED]
    whole = compared(converted(case, "ct"), case)
    monkeypatch.setattr(measuring, "CHUNK_WEIGHTS", 1000)
    parts = compared(converted(case, "ct"), case)
    assert whole.against is not None and parts.against is not None
    for one, other in zip(whole.against.figures, parts.against.figures, strict=True):
        assert one.name == other.name and one.agreement == other.agreement
        np.testing.assert_allclose(other.error, one.error, rtol=1e-6)


def test_figures_are_those_of_numpy() -> None:
    """Of one matrix, decoded by gguf-py and torch."""
    from tests.oracles.inverse import File

    case = CASES[LLAMA]
    name, gguf = "model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"
    report = compared(converted(case, "bf16"), case)
    assert report.against is not None
    (figures,) = [f for f in report.against.figures if f.name == name]
    there = File(case.model).values[gguf].double().numpy()
    difference = load(converted(case, "bf16"))[name].double().numpy() - there
    expected = np.sqrt(np.square(difference).sum() / np.square(there).sum())
    np.testing.assert_allclose(figures.error, expected, rtol=1e-4)
    rows = np.sqrt(np.square(difference).sum(1) / np.square(there).sum(1))
    np.testing.assert_allclose(figures.worst_row, rows.max(), rtol=1e-4)
    assert figures.gguf == gguf and figures.values == there.size


def test_an_unknown_family_can_not_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[LLAMA]
    monkeypatch.setattr(families, "FAMILIES", ())
    with pytest.raises(gguf2st.UnsupportedError, match="llama isn't written down here"):
        compared(converted(case, "bf16"), case)


def test_parts_that_are_not_on_both_sides_are_left_out() -> None:
    case, alone = CASES[QWEN35], CASES["qwen35-small-bf16-no-mtp"]
    report = compared(converted(case, "bf16"), alone)
    assert report.against is not None and not about_values(report)
    assert len(report.against.left_out) == 2  # MTP and vision
    assert {f.component for f in report.against.figures} == {"text"}
    report = compared(converted(alone, "bf16"), CASES["qwen35-small-bf16-fused-qkv"])
    assert report.against is not None and not about_values(report)
    assert "no MTP blocks" in report.against.left_out[0]


def test_command(tmp_path: Path) -> None:
    case = CASES[QWEN35]
    directory = converted(case, "bf16")
    arguments = ["verify", directory, "--against", case.model, "--mmproj", case.mmproj]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0 and "compared     text 28, mtp 15, vision 34: 77 same" in " ".join(
        result.output.split("\n")
    )
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    tensors = json.loads(result.output)["against"]["tensors"]
    assert len(tensors) == 77 and {"error", "bound", "worst_row"} <= tensors[0].keys()
    edit = opened(directory)
    decays(edit)
    arguments[1] = edit.write(tmp_path / "broken", directory)
    assert CliRunner().invoke(app, list(map(str, arguments))).exit_code == 1
    for more in (["--headers-only"], ["--mtp", FIXTURES / "no.gguf"]):
        assert CliRunner().invoke(app, [*map(str, arguments), *map(str, more)]).exit_code
    lonely = CliRunner().invoke(app, ["verify", str(directory), "--mmproj", str(case.mmproj)])
    assert isinstance(lonely.exception, gguf2st.UsageError)


def test_nothing_is_shared_with_what_converts() -> None:
    """Else a mistake there would be one here, too."""
    code = (
        "import sys, gguf2st.verification.against\n"
        "print([m for m in sys.modules if m.startswith(('gguf2st.mapping', 'gguf2st.targets', "
        "'gguf2st.quantize', 'gguf2st.folding', 'gguf2st.checkpoint'))])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert printed.stdout.strip() == b"[]"
