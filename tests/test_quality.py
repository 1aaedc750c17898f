"""Quality levels and budgets: which matrix gets which scheme, and that the checkpoint is what it says."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gguf2st
from gguf2st.cli import main
from gguf2st.engines import EngineRules
from gguf2st.mapping import resolve
from gguf2st.modules import modules_of
from gguf2st.plan import Plan
from tests.conversions import Case, cases
from tests.targets import decoders
from tests.test_exceptions import says_something, targets
from tests.test_requantize import BOUNDS, FIXTURES, MODELS, plain_matrix, tensors

# From the smallest scheme to the most exact one.
ORDER = ["int4 g128", "int4 g64", "int4 g32", "int8 g32"]
QKV = r"\.(self_attn\.[qkv]_proj|linear_attn\.in_proj_(qkv|z|qkvz))$"
DOWN = r"\.(mlp|shared_expert)\.down_proj$"
RAISED = {0: "(?!)", 1: "(?!)", 2: QKV, 3: f"{QKV}|{DOWN}"}
MOE = "qwen3moe/qwen3moe-Q4_K_M.gguf"


def planned(name: str, **options: Any) -> Plan:
    gguf, mmproj = MODELS.get(name, (name, None))
    model = gguf2st.open_model(FIXTURES / gguf, FIXTURES / mmproj if mmproj else None)
    return gguf2st.make_plan(model, gguf2st.PlanOptions(**{"to": "ct", **options}))


def schemes(plan: Plan) -> dict[str, str]:
    return {module.module.name: str(module.quantized.scheme) for module in plan.modules}


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_levels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, mmproj = (FIXTURES / file if file else None for file in MODELS[name])
    gguf2st.convert(gguf, tmp_path / "plain", mmproj=mmproj, to="f32")
    plain = tensors(tmp_path / "plain")
    sizes = []
    for level, raised in RAISED.items():
        out = tmp_path / f"level{level}"
        report = gguf2st.convert(gguf, out, mmproj=mmproj, to="ct", quality=level)
        sizes.append(report.total_bytes)
        written = tensors(out)
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        for module in report.modules:
            eight = re.search(raised, module.name)
            low = "int4 g128" if level == 0 else "int4 g32"
            assert module.scheme == ("int8 g32" if eight else low), module.name
            wanted = plain_matrix(plain, module.name)
            decoded = decoders.module(written, module.name, config, monkeypatch)
            error = float(np.sqrt(np.square(decoded - wanted).sum() / np.square(wanted).sum()))
            assert error < BOUNDS["ct8" if eight else "ct4"], module.name
        whole = [t for n, t in written.items() if re.search("lm_head|embed_tokens", n)]
        assert whole
        assert all(tensor.dtype == torch.bfloat16 for tensor in whole)
        assert not [warning for warning in report.warnings if "groups of matrices" in warning]
    assert all(smaller < larger for smaller, larger in pairwise(sizes))


@pytest.mark.parametrize("to", ["awq", "gptq"])
def test_levels_of_formats_that_cannot_mix(to: str) -> None:
    for level, group in enumerate(("g128", "g32")):
        plan = planned("llama", to=to, quality=level)
        assert all(scheme.endswith(group) for scheme in plan.schemes())
        # That many bits and no more give the same plan.
        within = planned("llama", to=to, bits_per_weight=plan.bits_per_weight)
        assert schemes(within) == schemes(plan)


@pytest.mark.parametrize("engines", [None, ("vllm", "sglang")], ids=["all", "vllm and sglang"])
@pytest.mark.parametrize("name", [MOE, "qwen35moe", "qwen3next/qwen3next-Q3_K_M.gguf"])
def test_experts_of_a_block_share_a_scheme(name: str, engines: tuple[str, ...] | None) -> None:
    mixed = False
    low, high = (planned(name, quality=0), planned(name, bits_per_weight=16))
    budgets = np.linspace(low.bits_per_weight, high.bits_per_weight, 25)
    choices: list[dict[str, Any]] = [{"quality": level} for level in range(4)]
    for choice in choices + [{"bits_per_weight": float(budget)} for budget in budgets]:
        found: dict[str, set[str]] = {}
        for module, scheme in schemes(planned(name, engines=engines, **choice)).items():
            if ".experts." in module:
                found.setdefault(module.partition(".experts.")[0], set()).add(scheme)
        assert found
        assert all(len(of_block) == 1 for of_block in found.values()), choice
        mixed |= len(set.union(*found.values())) > 1
    # transformers has one scheme for the experts of the whole model.
    assert mixed == (engines is not None and len(found) > 1)


@pytest.mark.parametrize("name", ["llama", "qwen35", MOE])
def test_more_bits_never_make_a_matrix_less_exact(name: str) -> None:
    low, high = planned(name, quality=0), planned(name, bits_per_weight=16)
    assert set(schemes(high).values()) == {"int8 g32"}
    budgets = [float(b) for b in np.linspace(low.bits_per_weight, high.bits_per_weight, 60)]
    plans = [planned(name, bits_per_weight=budget) for budget in budgets]
    sizes = [plan.bits_per_weight for plan in plans]
    assert schemes(plans[0]) == schemes(low)
    assert schemes(plans[-1]) == schemes(high)
    assert len(set(sizes)) > 6
    for budget, plan in zip(budgets, plans, strict=True):
        # Of all plans on the way none is larger and yet within the budget.
        assert plan.bits_per_weight == max(size for size in sizes if size <= budget)
        assert schemes(plan).keys() == schemes(low).keys()
    for coarse, fine in pairwise(map(schemes, plans)):
        assert all(ORDER.index(fine[n]) >= ORDER.index(coarse[n]) for n in fine)


def test_steps_of_a_budget_go_by_gain() -> None:
    """All go to g32 first, then q, k and v to 8 bits, then down projections; the experts of a block last."""
    low, high = planned("llama", quality=0), planned("llama", bits_per_weight=16)
    for budget in np.linspace(low.bits_per_weight, high.bits_per_weight, 60):
        found = schemes(planned("llama", bits_per_weight=float(budget)))
        if "int8 g32" in found.values():
            assert "int4 g128" not in found.values()
        of_qkv = {scheme for name, scheme in found.items() if re.search(QKV, name)}
        of_others = {scheme for name, scheme in found.items() if not re.search(QKV, name)}
        assert "int8 g32" not in of_others or of_qkv == {"int8 g32"}
    found = schemes(planned(MOE, bits_per_weight=7.3))
    experts = {scheme for name, scheme in found.items() if ".experts." in name}
    assert {scheme for name, scheme in found.items() if ".experts." not in name} == {"int8 g32"}
    assert experts == {"int4 g32"}


def test_the_report_keeps_the_budget(tmp_path: Path) -> None:
    """Shards of any size count, and so do config.json and the tokenizer."""
    gguf = FIXTURES / MODELS["llama"][0]
    report = gguf2st.convert(
        gguf, tmp_path / "out", to="ct", bits_per_weight=7.6, max_shard_bytes=100_000
    )
    assert report.shards > 3
    size = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert report.total_bytes == size
    assert 7.4 < report.bits_per_weight <= 7.6
    again = gguf2st.convert(
        gguf, tmp_path / "again", to="ct", bits_per_weight=7.6, max_shard_bytes=100_000, threads=2
    )
    assert again.schemes == report.schemes
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_targets_name_what_is_written() -> None:
    low, high = planned("qwen35", quality=0), planned("qwen35", bits_per_weight=16)
    for budget in np.linspace(low.bits_per_weight, high.bits_per_weight, 20):
        plan = planned("qwen35", bits_per_weight=float(budget))
        config = json.loads(plan.documents["config.json"])["quantization_config"]
        written = {module.module.name for module in plan.modules}
        assert all(says_something(entry, written, loose=False) for entry in targets(config))
        assert len(config["config_groups"]) == len(plan.schemes())


def test_what_an_engine_refuses_falls_to_the_next_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = EngineRules.refusal

    def no_int8_down(self: EngineRules, shapes: dict[str, Any], scheme: Any) -> str | None:
        if scheme.bits == 8 and any("down_proj" in name for name in shapes):
            return "no kernel"
        return refusal(self, shapes, scheme)

    monkeypatch.setattr(EngineRules, "refusal", no_int8_down)
    plan = planned("llama", quality=3)
    found = schemes(plan)
    assert found["model.layers.0.mlp.down_proj"] == "int4 g32"
    assert found["model.layers.0.self_attn.q_proj"] == "int8 g32"
    assert any("int4 g32 and not int8 g32 (no kernel)" in warning for warning in plan.warnings)
    largest = planned("llama", bits_per_weight=16)
    assert schemes(largest)["model.layers.1.mlp.down_proj"] == "int4 g32"
    assert schemes(largest)["model.layers.1.mlp.up_proj"] == "int8 g32"


def test_a_kept_matrix_names_what_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that 128 doesn't divide its columns, which 32 does."""
    refusal = EngineRules.refusal

    def no_value(self: EngineRules, shapes: dict[str, Any], scheme: Any) -> str | None:
        if any("v_proj" in name for name in shapes):
            return "no kernel"
        return refusal(self, shapes, scheme)

    monkeypatch.setattr(EngineRules, "refusal", no_value)
    plan = planned("mistral-small/mistral-small-bf16.gguf", engines=("hf",))
    kept = {kept.name: kept.reason for kept in plan.kept}
    assert kept["model.layers.0.self_attn.v_proj"] == "no kernel"


@pytest.mark.parametrize("choice", [{"quality": 0}, {"quality": 3}, {"bits_per_weight": 6.0}])
def test_an_output_head_never_has_four_bits(choice: dict[str, Any]) -> None:
    plan = planned("llama", quantize=("lm_head",), **choice)
    assert schemes(plan)["lm_head"] == "int8 g32"
    plan = planned("llama", to="awq", quality=0, quantize=("lm_head",))
    assert "needs 8 bits" in {kept.name: kept.reason for kept in plan.kept}["lm_head"]


def test_zero_points_are_for_four_bits_alone() -> None:
    options = gguf2st.TargetOptions(symmetric=False)
    found = planned("llama", quality=2, target=options).schemes()
    assert set(found) == {"int8 g32", "int4 asymmetric g32"}


def test_a_budget_that_is_hardly_used_says_why() -> None:
    plan = planned(MOE, bits_per_weight=9)
    unused = [warning for warning in plan.warnings if "bits per weight are used" in warning]
    assert len(unused) == 1
    assert "the next larger plan has 9.9" in unused[0]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_matrix_but_experts_is_in_a_class(case: Case) -> None:
    """A table that forgets one would give it bits last."""
    for recipe in resolve(gguf2st.open_model(case.model, case.mmproj, case.mtp)).recipes:
        for module in modules_of(recipe):
            if recipe.unquantized is None:
                assert (recipe.priority is None) == (".experts." in module.name), module.name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quality": 4}, gguf2st.UsageError, "--quality 4 isn't one of the levels 0 to 3"),
        ({"quality": 1, "bits_per_weight": 5}, gguf2st.UsageError, "leave one of them out"),
        (
            {"quality": 1, "target": gguf2st.TargetOptions(bits=8)},
            gguf2st.UsageError,
            "--quality chooses bits and group sizes by itself",
        ),
        (
            {"bits_per_weight": 9, "target": gguf2st.TargetOptions(group_size=32)},
            gguf2st.UsageError,
            "--bits-per-weight chooses bits",
        ),
        (
            {"quality": 1, "target": gguf2st.TargetOptions(mixed=(("q", "int8"),))},
            gguf2st.UsageError,
            "leave --bits, --group-size and --scheme out",
        ),
        ({"quality": 2, "to": "awq"}, gguf2st.UsageError, "--quality 0 to 1 and not 2"),
        ({"quality": 1, "to": "fp8"}, gguf2st.UsageError, "fp8 has no choice of quality"),
        ({"quality": 1, "to": "bf16"}, gguf2st.UsageError, "one of awq, compressed-tensors, gptq"),
        ({"bits_per_weight": 6, "to": "lossless"}, gguf2st.UsageError, "lossless has no choice"),
        ({"bits_per_weight": 0}, gguf2st.UsageError, "isn't a size"),
        ({"bits_per_weight": float("inf")}, gguf2st.UsageError, "isn't a size"),
        ({"bits_per_weight": float("nan")}, gguf2st.UsageError, "isn't a size"),
        ({"bits_per_weight": 4}, gguf2st.UnsupportedError, r"has 6\.65\d bits per weight"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned("llama", **options)


def test_the_smallest_figure_of_a_refusal_is_accepted() -> None:
    with pytest.raises(gguf2st.UnsupportedError) as caught:
        planned("qwen35", bits_per_weight=4)
    figure = re.search(r"give --bits-per-weight ([\d.]+) or more", str(caught.value))
    assert figure is not None
    assert planned("qwen35", bits_per_weight=float(figure[1])).modules


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    gguf = str(FIXTURES / MODELS["llama"][0])
    for option, wanted in (("--quality", "2"), ("--bits-per-weight", "8.1")):
        with pytest.raises(SystemExit) as ended:
            main(["convert", gguf, "--to", "ct", option, wanted, "--dry-run", "--force"])
        assert ended.value.code == 0
        assert "6 matrices as int8 g32" in capsys.readouterr().out


def test_classes_that_gains_are_measured_of() -> None:
    """Each matrix that a plan quantizes is of one class of the benchmark."""
    from benchmarks.gains import classes_of  # and with it transformers

    classes = classes_of(FIXTURES / MODELS["qwen35moe"][0])
    assert list(classes) == ["qkv", "down", "attention_output", "gate_up", "experts"]
    for name in schemes(planned("qwen35moe")):
        assert sum(re.search(pattern, name) is not None for pattern in classes.values()) == 1, name
