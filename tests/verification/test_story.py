"""A checkpoint that cost people evenings: every projection of the gated delta nets is packed, and the
exceptions have the prefix of another class. One screen says what each engine makes of it."""

from pathlib import Path

import gguf2st
from gguf2st.verification import Mend
from tests.verification.editing import Edit, base, opened

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
BLOCK = "layers.0.linear_attn"


def story(directory: Path, prefix: str = "model.language_model.") -> Path:
    source = base("qwen35", "ct", group_size=32)
    edit: Edit = opened(source)
    for name in ("in_proj_b", "in_proj_a"):
        edit.pack(f"model.{BLOCK}.{name}")
    kept = [e for e in edit.quantization["ignore"] if "in_proj" not in e]
    edit.quantization["ignore"] = kept + [f"{prefix}{BLOCK}.{name}" for name in PROJECTIONS]
    return edit.write(directory, source)


def test_the_story(tmp_path: Path) -> None:
    report = gguf2st.verify(story(tmp_path / "story"))
    assert [str(v.loading) for v in report.verdicts] == ["crashes", "crashes", "loads"]
    assert "size_n = 16 is not divisible by tile_n_size = 64" in report.verdicts[1].message
    text = report.to_text()
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 110
    # vLLM translates the prefix, so that the entries hit what is quantized ...
    [excepted] = report.of("D-01")
    assert excepted.engine == "vllm" and "model.language_model.layers.0" in excepted.reason
    # ... SGLang doesn't, takes the two small matrices for what they are, and has no kernel.
    narrow = next(f for f in report.of("D-09") if f.engine == "sglang")
    assert narrow.remedy.mend is Mend.DEQUANTIZE
    assert set(narrow.remedy.modules) == {f"model.{BLOCK}.in_proj_b", f"model.{BLOCK}.in_proj_a"}
    [dead] = report.of("D-03")
    assert dead.remedy.names[f"model.language_model.{BLOCK}.out_proj"] == f"model.{BLOCK}.out_proj"


def test_it_is_the_narrow_ones_alone(tmp_path: Path) -> None:
    """Without the exceptions everything but in_proj_a and in_proj_b is right."""
    source = story(tmp_path / "story")
    edit = opened(source)
    edit.quantization["ignore"] = [e for e in edit.quantization["ignore"] if "linear_attn" not in e]
    for name in ("in_proj_b", "in_proj_a"):
        edit.dequantize(f"model.{BLOCK}.{name}")
        edit.quantization["ignore"].append(f"model.{BLOCK}.{name}")
    report = gguf2st.verify(edit.write(tmp_path / "mended", source))
    assert report.right and not [f for f in report.findings if f.effect == "risk"]
