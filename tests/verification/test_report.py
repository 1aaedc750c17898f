"""What users see: verdicts, reasons, exit codes; and configs of any content."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import gguf2st
from gguf2st.cli import app
from gguf2st.verification import RULES, Effect, Loading, Mend
from tests.verification.editing import base, opened


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    source = base("llama", "ct", group_size=32)
    edit = opened(source)
    edit.quantization["ignore"].append("model.layers.0.mlp.down_proj")
    return edit.write(tmp_path / "broken", source)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_verdicts(broken: Path) -> None:
    report = gguf2st.verify(broken)
    assert [v.loading for v in report.verdicts] == [Loading.CRASHES, Loading.WRONG, Loading.WRONG]
    [crash] = [f for f in report.findings if f.engine == "vllm"]
    assert crash.message == (
        "ValueError: There is no module or parameter named 'layers.0.mlp.down_proj.weight_packed'"
    )
    assert crash.remedy.mend is Mend.MATCH and crash.subjects == ("model.layers.0.mlp.down_proj",)


def test_exit_codes(broken: Path, tmp_path: Path) -> None:
    assert run(base("llama", "ct", group_size=32)).exit_code == 0
    assert run(broken).exit_code == 1
    assert run(broken, "--engine", "vllm").exit_code == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, error in (
        ((empty,), gguf2st.InputError),
        ((tmp_path / "absent",), gguf2st.InputError),
        ((broken, "--engine", "llama.cpp"), gguf2st.UsageError),
        ((broken, "--tp", "0"), gguf2st.UsageError),
    ):
        assert isinstance(run(*arguments).exception, error)


def test_json(broken: Path) -> None:
    content = json.loads(run(broken, "--json").output)
    assert content["kind"] == "verification" and content["right"] is False
    assert {v["engine"]: v["loading"] for v in content["verdicts"]} == {
        "vllm": "crashes",
        "sglang": "silently wrong",
        "hf": "silently wrong",
    }
    assert {f["rule"] for f in content["findings"]} == {"D-01"}
    assert content["findings"][0]["count"] == 1


def test_text(broken: Path) -> None:
    text = run(broken).output
    assert "vLLM         crashes" in text and "SGLang       silently wrong" in text
    assert "D-01         crash in vLLM; silently wrong in SGLang, transformers" in text
    assert len(text.splitlines()) < 24


def test_text_cant_steer_a_terminal(tmp_path: Path) -> None:
    source = base("llama")
    edit = opened(source)
    edit.tensors["model.\x1b[31mred"] = edit.tensors["model.norm.weight"].clone()
    text = gguf2st.verify(edit.write(tmp_path / "x", source)).to_text()
    assert "\x1b" not in text and r"model.\x1b[31mred" in text


def test_a_class_that_isnt_known(tmp_path: Path) -> None:
    """Rules that need no names still hold, and the report says what wasn't looked at."""
    source = base("llama", "ct", group_size=32)
    edit = opened(source)
    edit.config["architectures"] = ["NewForCausalLM"]
    edit.group()["weights"]["rounding"] = 1
    report = gguf2st.verify(edit.write(tmp_path / "x", source))
    assert {f.rule for f in report.findings if f.fatal} == {"D-30"}
    assert any("layers of NewForCausalLM isn't known" in text for text in report.unchecked)
    assert any("missing tensors weren't looked for" in text for text in report.unchecked)


def test_headers_alone(broken: Path, tmp_path: Path) -> None:
    """A directory of which only the beginnings of files were fetched gives the same findings."""
    for name in ("exact", "longer"):
        directory = tmp_path / name
        shutil.copytree(broken, directory)
        file = directory / "model.safetensors"
        (length,) = struct.unpack("<Q", file.read_bytes()[:8])
        file.write_bytes(file.read_bytes()[: 8 + length + (0 if name == "exact" else 1000)])
    whole = gguf2st.verify(broken)
    exact = gguf2st.verify(tmp_path / "exact")
    assert exact.headers_only and exact.findings == whole.findings
    assert {f.rule for f in gguf2st.verify(tmp_path / "longer").findings} == {"D-01", "D-37"}
    longer = gguf2st.verify(tmp_path / "longer", headers_only=True)
    assert longer.findings == whole.findings


def test_rules_are_documented() -> None:
    for name, rule in RULES.items():
        assert "Source:" in rule.doc, name


CONFIG = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["weights", "targets", "config_groups", "ignore", "a", "group_0", "text_config"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)
KEYS = [
    "architectures",
    "model_type",
    "quantization_config",
    "text_config",
    "vision_config",
    "num_hidden_layers",
    "layer_types",
    "hidden_size",
    "tie_word_embeddings",
    "dtype",
    "num_attention_heads",
    "mtp_num_hidden_layers",
]


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)
@given(
    st.sampled_from([("llama", "ct"), ("qwen35", "ct"), ("qwen35", "awq"), ("qwen35", "bf16")]),
    st.dictionaries(st.sampled_from(KEYS), CONFIG, min_size=1, max_size=3),
    st.dictionaries(
        st.sampled_from(
            ["ignore", "config_groups", "format", "modules_to_not_convert", "bits", "group_size"]
        ),
        CONFIG,
        max_size=2,
    ),
)
def test_configs_of_any_content(
    tmp_path_factory: pytest.TempPathFactory, kind: Any, top: dict[str, Any], inner: dict[str, Any]
) -> None:
    """No config raises: what can't be read becomes a finding."""
    source = base(*kind)
    directory = tmp_path_factory.getbasetemp() / f"any-{'-'.join(kind)}"
    if not directory.exists():
        shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        config["quantization_config"] |= inner
    (directory / "config.json").write_text(json.dumps(config | top))
    report = gguf2st.verify(directory)
    report.to_text()
    json.dumps(report.to_dict())


def test_effects_are_in_order() -> None:
    assert [e.name for e in Effect] == ["NOTE", "RISK", "SLOWER", "WRONG", "CRASH"]
