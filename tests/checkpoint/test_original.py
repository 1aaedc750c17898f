"""Files of the original checkpoint that the user has: taken over, and compared with the GGUF."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

import gguf2st

FIXTURES = Path(__file__).parents[2] / "fixtures"
QWEN = FIXTURES / "qwen35-small"
MODEL = QWEN / "qwen35-small-bf16.gguf"
MMPROJ = QWEN / "mmproj-qwen35-small-bf16.gguf"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """The fixture's own config and tokenizer, to be changed."""
    directory = tmp_path / "original"
    directory.mkdir()
    for file in QWEN.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "original.json":
            shutil.copy(file, directory)
    return directory


def change(path: Path, **fields: object) -> None:
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(content | fields), "utf-8")


def test_the_original_config_is_taken_and_fits(original: Path, tmp_path: Path) -> None:
    gguf2st.convert(MODEL, tmp_path / "out", mmproj=MMPROJ, config_from=original)
    ours, theirs = (AutoConfig.from_pretrained(d).to_dict() for d in (tmp_path / "out", original))
    for config in (ours, theirs):
        config.pop("_name_or_path", None)
        config["dtype"] = None
        for part in ("text_config", "vision_config"):
            config[part]["dtype"] = None
    assert ours == theirs


def test_a_field_that_differs_is_told_and_the_original_wins(original: Path, tmp_path: Path) -> None:
    change(original / "config.json", video_token_id=11, tie_word_embeddings=True)
    report = gguf2st.convert(MODEL, tmp_path / "out", mmproj=MMPROJ, config_from=original)
    written = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert written["video_token_id"] == 11
    assert any(line.startswith("video_token_id") for line in report.differences)
    # The head is in the file, whatever the original says.
    assert written["tie_word_embeddings"] is False
    assert any(line.startswith("tie_word_embeddings") for line in report.differences)


def test_a_config_of_another_model_is_refused(original: Path, tmp_path: Path) -> None:
    text = json.loads((original / "config.json").read_text("utf-8"))["text_config"]
    change(original / "config.json", text_config=text | {"hidden_size": 4096})
    with pytest.raises(gguf2st.UsageError, match=r"text_config\.hidden_size = 4096"):
        gguf2st.convert(MODEL, tmp_path / "out", mmproj=MMPROJ, config_from=original)
    assert not (tmp_path / "out").exists()


def test_the_original_tokenizer_is_taken_as_it_is(original: Path, tmp_path: Path) -> None:
    gguf2st.convert(MODEL, tmp_path / "out", tokenizer_from=original)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (original / name).read_bytes()
    text = "Fünf 東京 <|im_end|> x = 42"
    ours, theirs = (AutoTokenizer.from_pretrained(d) for d in (tmp_path / "out", original))
    assert ours(text).input_ids == theirs(text).input_ids


def test_a_chat_template_that_differs_is_told(original: Path, tmp_path: Path) -> None:
    (original / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    report = gguf2st.convert(MODEL, tmp_path / "out", tokenizer_from=original)
    assert any("chat template differs" in line for line in report.differences)
    assert (tmp_path / "out" / "chat_template.jinja").read_text("utf-8") == "{{ messages }}"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe"])
def test_a_damaged_file_is_named(original: Path, tmp_path: Path, name: str, content: bytes) -> None:
    (original / name).write_bytes(content)
    option = "config_from" if name == "config.json" else "tokenizer_from"
    with pytest.raises(gguf2st.InputError) as caught:
        gguf2st.convert(MODEL, tmp_path / "out", mmproj=MMPROJ, **{option: original})
    assert str(original / name) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["nowhere", "a/b/c"])
def test_neither_a_directory_nor_a_hub_name(tmp_path: Path, place: str) -> None:
    with pytest.raises(gguf2st.UsageError, match="neither a directory nor the name"):
        gguf2st.convert(MODEL, tmp_path / "out", tokenizer_from=place)
