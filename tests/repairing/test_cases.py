"""Every broken checkpoint of tests/verification is mended, or refused with the reason.

What the output has to hold is made here from the broken input: its own bytes, the modules that the
report lists as dequantized read by decoders that aren't ours, and what the case itself changed undone.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gguf2st
from tests.conversions import load
from tests.engines.dequantized import with_merged_experts
from tests.targets import decoders
from tests.verification.cases import CASES, Broken
from tests.verification.editing import base, opened

Tensors = dict[str, torch.Tensor]
# Rule and name of a case -> what the report has to say.
REFUSED = {
    "D-11-words_over_ranks": "weight_packed has 32 words for 520 columns",
    "D-13-scales_missing": "only weight_packed, weight_shape: no whole set of any format",
    # transformers reads such experts stacked alone, and SGLang one by one alone.
    "D-17-experts_with_zero_points": "SGLang reads those of Qwen3MoeForCausalLM one by one alone",
    "D-18-card_too_old": "needs compute capability 80",
    "D-22-head_missing": "it may be lost, or the embedding",
    "D-22-head_missing_quantized": "it may be lost, or the embedding",
    "D-24-norm_missing": "layers.1.post_attention_layernorm.weight: missing",
    "D-24-norm_missing_quantized": "layers.1.post_attention_layernorm.weight: missing",
    "D-24-expert_missing": "experts.1.up_proj.weight: missing",
    "D-25-width_of_another_model": "the shape isn't what config.json says",
    "D-25-width_of_a_larger_model": "the shape isn't what config.json says",
    "D-37-header_overlapping": "it overlaps another tensor",
    "D-38-tokenizer_missing": "isn't there, nor another tokenizer",
    "D-39-layer_types_too_short": "has 1 entries",
    "D-40-size_missing": "num_hidden_layers isn't there",
}
# All others are mended without touching a weight.
DEQUANTIZED = {
    "D-06-shards_of_two_schemes",
    "D-09-narrow_projections_packed",
    "D-10-groups_over_ranks",
    "D-12-groups_of_16",
    "D-15-eight_bits_on_a_cpu",
    "D-16-experts_over_ranks",
    "D-19-router_packed",
}


def good_tensors(case: Broken, tensors: Tensors) -> Tensors:
    return load(base(*case.base, **case.options))


def without(name: str) -> Callable[[Broken, Tensors], Tensors]:
    return lambda _, tensors: {key: tensor for key, tensor in tensors.items() if name not in key}


# What the case did to the tensors, undone.
UNDONE: dict[str, Callable[[Broken, Tensors], Tensors]] = {
    "D-27-prefix_of_another_class": good_tensors,
    "D-28-experts_packed_in_a_stack": good_tensors,
    "D-28-experts_in_a_stack": good_tensors,
    "D-26-dtype_of_a_norm": good_tensors,
    "D-23-tensor_left_over": without("g_norm"),
    # An incomplete drafter is worth nothing.
    "D-20-drafter_incomplete": without("mtp."),
}


def dequantized(tensors: Tensors, config: dict, modules: tuple[str, ...]) -> Tensors:
    quantization = config.get("quantization_config", {}) | {"ignore": []}
    dtype = getattr(torch, config["dtype"])
    found = dict(tensors)
    for name in modules:
        with pytest.MonkeyPatch.context() as patch:
            weights = decoders.module(tensors, name, quantization, patch)
        for leaf in decoders.module_tensors(tensors, name):
            del found[f"{name}.{leaf}"]
        found[f"{name}.weight"] = torch.from_numpy(weights).to(dtype)
    return found


def states(directory: Path) -> dict[str, tuple[str, int]]:
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in directory.iterdir()
    }


def check_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        one, other = (t.contiguous().view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(one, other), name


@pytest.mark.parametrize("case", [c for c in CASES if str(c) not in REFUSED], ids=str)
def test_mended(case: Broken, tmp_path: Path) -> None:
    source = base(*case.base, **case.options)
    edit = opened(source)
    case.broken(edit)
    broken, output = edit.write(tmp_path / "broken", source), tmp_path / "mended"
    before = states(broken)
    report = gguf2st.repair(broken, output, **case.request)
    assert report.written and report.right, report.to_text()
    assert states(broken) == before
    verdict = gguf2st.verify(output, **case.request)
    assert verdict.right, verdict.to_text()
    assert not [f for f in verdict.of(case.rule) if f.effect in ("risk", "crash", "silently wrong")]
    assert bool(report.dequantized) == (str(case) in DEQUANTIZED)

    expected = UNDONE.get(str(case), lambda _, tensors: tensors)(case, load(broken))
    expected = dequantized(expected, edit.config, report.dequantized)
    check_equal(load(output), expected)
    for path in broken.iterdir():
        if path.suffix != ".safetensors" and path.name not in report.plan.documents:
            assert (output / path.name).read_bytes() == path.read_bytes()
    # Nothing is left to do.
    again = gguf2st.repair(output, tmp_path / "again", dry_run=True, **case.request)
    assert not again.plan.changes, again.to_text()


@pytest.mark.parametrize("case", [c for c in CASES if str(c) in REFUSED], ids=str)
def test_refused(case: Broken, tmp_path: Path) -> None:
    source = base(*case.base, **case.options)
    edit = opened(source)
    case.broken(edit)
    broken, output = edit.write(tmp_path / "broken", source), tmp_path / "mended"
    before = states(broken)
    report = gguf2st.repair(broken, output, **case.request)
    assert not report.right and not report.written
    assert REFUSED[str(case)] in " ".join(report.to_text().split())
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
    assert states(broken) == before
    json.dumps(report.to_dict())


def test_unquantized_experts(tmp_path: Path) -> None:
    """transformers reads them stacked alone beside compressed-tensors, SGLang one by one alone."""
    source = base("qwen3moe", "ct")
    edit = opened(source)
    for module in edit.modules(".experts.", "weight_packed"):
        edit.dequantize(module)
    edit.quantization["ignore"].append(r"re:.*\.experts\..*")
    broken = edit.write(tmp_path / "broken", source)
    assert gguf2st.repair(broken, tmp_path / "sglang", engines=("vllm", "sglang")).right
    check_equal(load(tmp_path / "sglang"), load(broken))
    report = gguf2st.repair(broken, tmp_path / "hf", engines=("vllm", "hf"))
    assert report.right, report.to_text()
    check_equal(load(tmp_path / "hf"), with_merged_experts(load(broken)))
    refused = gguf2st.repair(broken, tmp_path / "all")
    assert not refused.right and "one by one alone" in " ".join(refused.to_text().split())


@pytest.mark.parametrize("to", ["bf16", "ct"])
def test_a_head_that_is_known_to_be_the_embedding(to: str, tmp_path: Path) -> None:
    """Only who says so gets it, and reads that it was taken for granted."""
    source = base("llama", to)
    edit = opened(source)
    edit.drop("lm_head")
    broken = edit.write(tmp_path / "broken", source)
    report = gguf2st.repair(broken, tmp_path / "mended", tied=True)
    assert report.written and gguf2st.verify(tmp_path / "mended").right
    assert "assumed" in report.to_text() and "as --tied says" in report.to_dict()["assumptions"][0]
    config = json.loads((tmp_path / "mended" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    check_equal(load(tmp_path / "mended"), load(broken))


def test_a_head_that_a_part_of_the_config_ties(tmp_path: Path) -> None:
    source = base("qwen35", "bf16", mmproj=True)
    edit = opened(source)
    edit.drop("lm_head")
    edit.config["tie_word_embeddings"], edit.text["tie_word_embeddings"] = False, True
    broken = edit.write(tmp_path / "broken", source)
    report = gguf2st.repair(broken, tmp_path / "mended")
    assert report.written and "as one part of config.json says" in report.plan.assumptions[0]
    assert gguf2st.verify(tmp_path / "mended").right
    edit.text["tie_word_embeddings"] = False
    broken = edit.write(tmp_path / "lost", source)
    assert not gguf2st.repair(broken, tmp_path / "unmended").written
    assert not (tmp_path / "unmended").exists()
