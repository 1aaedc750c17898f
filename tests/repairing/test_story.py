"""The checkpoint of tests/verification/test_story.py is mended: two small matrices of each gated delta
net and the config are all that changes."""

import json
from pathlib import Path

import pytest
import torch

import gguf2st
from gguf2st.verification import Mend
from tests.conversions import load
from tests.repairing.test_cases import check_equal, dequantized
from tests.verification.editing import base, opened
from tests.verification.test_story import BLOCK, PROJECTIONS, story

NARROW = {f"model.{BLOCK}.in_proj_b", f"model.{BLOCK}.in_proj_a"}


def test_the_story(tmp_path: Path) -> None:
    source, output = story(tmp_path / "story"), tmp_path / "mended"
    report = gguf2st.repair(source, output)
    assert report.right and set(report.dequantized) == NARROW
    assert gguf2st.verify(output).right
    text = report.to_text()
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 110

    before, after = load(source), load(output)
    config = json.loads((source / "config.json").read_text())
    check_equal(after, dequantized(before, config, report.dequantized))
    # All else is byte for byte what it was.
    changed = {name for name in before.keys() | after.keys() if not same(before, after, name)}
    assert {name.rpartition(".")[0] for name in changed} == NARROW
    assert list(report.plan.documents) == ["config.json"]
    assert set(report.plan.config_changes) == {"quantization_config.ignore"}
    ignore = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    for name in PROJECTIONS:
        assert (f"model.{BLOCK}.{name}" in ignore) == (f"model.{BLOCK}.{name}" in NARROW)
    assert not any("model.language_model" in entry for entry in ignore)
    assert {change.what for change in report.plan.changes} == {Mend.MATCH, Mend.DEQUANTIZE}


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], name: str) -> bool:
    return name in before and name in after and torch.equal(before[name], after[name])


def test_a_quantized_drafter(tmp_path: Path) -> None:
    """vLLM's and SGLang's drafters have mtp.fc unquantized; plain serving never reads it."""
    source = base("qwen35", "ct", group_size=32)
    edit = opened(source)
    edit.pack("mtp.fc")
    edit.quantization["ignore"] = [e for e in edit.quantization["ignore"] if "mtp.fc" not in e]
    broken = edit.write(tmp_path / "broken", source)
    report = gguf2st.repair(broken, tmp_path / "mended")
    assert report.right and report.dequantized == ("mtp.fc",), report.to_text()
    config = edit.config | {"quantization_config": edit.quantization}
    check_equal(load(tmp_path / "mended"), dequantized(load(broken), config, ("mtp.fc",)))


def test_what_tensors_do_not_say_is_kept(tmp_path: Path) -> None:
    """Observers, versions and the like are of those who quantized; only what contradicts changes."""
    source = base("llama", "ct", group_size=32)
    edit = opened(source)
    more = {"kv_cache_scheme": None, "version": "0.12.1", "global_compression_ratio": 1.5}
    edit.quantization.update(more)
    edit.group()["weights"]["observer"] = "mse"
    edit.quantization["ignore"].append("model.layers.0.mlp.down_proj")
    broken = edit.write(tmp_path / "broken", source)
    report = gguf2st.repair(broken, tmp_path / "mended")
    assert report.right and set(report.plan.config_changes) == {"quantization_config.ignore"}


@pytest.mark.parametrize("value", [7, "Linear", ["Linear"], {"group_0": 3}, {"group_0": {}}, None])
@pytest.mark.parametrize("key", ["config_groups", "ignore", "format", "quant_method"])
def test_values_of_the_wrong_kind(key: str, value: object, tmp_path: Path) -> None:
    """A report, whatever a stranger's config holds, and what is written is right."""
    source = base("llama", "ct", group_size=32)
    edit = opened(source)
    edit.quantization[key] = value
    broken = edit.write(tmp_path / "broken", source)
    report = gguf2st.repair(broken, tmp_path / "mended")
    assert report.to_text()
    assert report.right == (tmp_path / "mended").exists()
    if report.right:
        assert gguf2st.verify(tmp_path / "mended").right
