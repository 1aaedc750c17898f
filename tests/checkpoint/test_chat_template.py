from pathlib import Path, PurePosixPath

import pytest
from transformers import AutoTokenizer

from gguf2st.checkpoint.chat_template import chat_templates
from tests.checkpoint.vocabularies import files, metadata, models, write

KEY = "tokenizer.chat_template"
JINJA = "{{ messages[0].content }}"


def save(folder: Path, templates: dict[str, str]) -> None:
    for name, text in templates.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def test_a_template_renders_as_the_models_maker_meant_it(tmp_path: Path) -> None:
    write(tmp_path, files("smollm2"), model_type="llama")
    templates = chat_templates(metadata("smollm2"))
    assert list(templates) == ["chat_template.jinja"]
    save(tmp_path, templates)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_named_templates_are_found_by_transformers(tmp_path: Path) -> None:
    write(tmp_path, files("smollm2"), model_type="llama")
    templates = chat_templates(metadata("command-r"))
    assert sorted(templates) == [
        "additional_chat_templates/rag.jinja",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
    ]
    save(tmp_path, templates)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert set(loaded.chat_template) == {"default", "rag", "tool_use"}
    messages = [{"role": "user", "content": "Where?"}]
    documents = [{"title": "Atlas", "text": "There."}]
    rag = loaded.apply_chat_template(
        messages, chat_template="rag", documents=documents, tokenize=False
    )
    assert "title: Atlas" in rag
    assert "Where?" in rag


def test_templates_in_llama_cpps_source_stay_as_they_are() -> None:
    for file in sorted((models() / "templates").glob("*.jinja")):
        text = file.read_text(encoding="utf-8")
        assert chat_templates({KEY: text}) == {"chat_template.jinja": text}


@pytest.mark.parametrize("name", ["mistral-v7-tekken", "rwkv-world", "chatml", "", "plain { text"])
def test_the_name_of_a_built_in_template_is_no_template(name: str) -> None:
    warnings: list[str] = []
    assert chat_templates({KEY: name, KEY + ".tool_use": JINJA}, warnings=warnings) == {
        "additional_chat_templates/tool_use.jinja": JINJA
    }
    assert len(warnings) == 1
    assert repr(name) in warnings[0]


def test_a_template_that_is_no_text() -> None:
    warnings: list[str] = []
    assert chat_templates({KEY: 7}, warnings=warnings) == {}
    assert chat_templates({KEY: 7}) == {}
    assert "holds no text" in warnings[0]


NASTY = [
    "../../etc/passwd",
    "..",
    ".",
    "",
    "/absolute",
    "a/b",
    "a\\b",
    "C:\\x",
    "nul\x00l",
    "line\nend",
    "\u0130\u4f60",
    "x" * 5000,
    ".hidden",
    "%2e%2e%2f",
]


def test_no_name_escapes_the_folder() -> None:
    files = chat_templates({f"{KEY}.{name}": JINJA for name in NASTY})
    assert len(files) == len(NASTY)
    assert len({name.lower() for name in files}) == len(NASTY)
    for name in files:
        path = PurePosixPath(name)
        assert path.parts[0] == "additional_chat_templates"
        assert len(path.parts) == 2
        assert path.suffix == ".jinja"
        assert path.stem.replace("_", "").replace("-", "").isalnum() or set(path.stem) == {"_"}
        assert path.stem.isascii()
        assert len(path.name) < 100


def test_no_other_template_takes_the_defaults_place() -> None:
    assert chat_templates({KEY: "{{ 1 }}", KEY + ".default": "{{ 2 }}"}) == {
        "chat_template.jinja": "{{ 1 }}"
    }
    assert chat_templates({KEY + ".default": "{{ 2 }}"}) == {"chat_template.jinja": "{{ 2 }}"}
    assert chat_templates({}) == {}


def test_names_differ_on_file_systems_that_ignore_case() -> None:
    files = chat_templates({f"{KEY}.{name}": JINJA for name in ("RAG", "rag", "Rag")})
    assert sorted(name.lower() for name in files) == [
        "additional_chat_templates/rag.jinja",
        "additional_chat_templates/rag_2.jinja",
        "additional_chat_templates/rag_3.jinja",
    ]
