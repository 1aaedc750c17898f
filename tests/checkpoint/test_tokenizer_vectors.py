"""The written tokenizers against the test vectors in llama.cpp's source.

Those were made with the original models' tokenizers (`convert_hf_to_gguf_update.py`), except for
qwen35's, which llama.cpp itself made. So was the hash by which llama.cpp's converter recognises
how a tokenizer cuts text: it covers one long text with everything, and added tokens.
"""

import ast
import hashlib
import re
import unicodedata
from functools import cache

import pytest

from tests.checkpoint.vocabularies import (
    WITH_VECTORS,
    files,
    metadata,
    models,
    tokenizer,
    uncomposed,
)
from tests.oracles.llama_cpp_source import llama_cpp_source

COMPOSING = ("command-r", "mpt", "qwen2", "qwen35")
BYTE_PAIR = [
    name for name in WITH_VECTORS if name not in ("bert-bge", "gemma-4", "llama-spm", "phi-3")
]


def vectors(name: str) -> list[tuple[str, list[int]]]:
    file = models() / f"ggml-vocab-{name}.gguf"
    inputs = file.with_name(file.name + ".inp").read_text(encoding="utf-8")
    outputs = file.with_name(file.name + ".out").read_text(encoding="utf-8").splitlines()
    texts = inputs.split("\n__ggml_vocab_test__\n")
    assert len(texts) > 40
    return [
        (text, [int(token) for token in line.split()])
        for text, line in zip(texts, outputs, strict=False)
    ]


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_ids_are_those_of_the_vectors(name: str) -> None:
    with uncomposed(name) as written:
        wrong = [
            (text, expected, found)
            for text, expected in vectors(name)
            if (found := written.encode(text, add_special_tokens=False).ids) != expected
        ]
    assert not wrong


@pytest.mark.parametrize("name", COMPOSING)
def test_composition_changes_only_decomposed_texts(name: str) -> None:
    assert files(name).tokenizer_json["normalizer"] == {"type": "NFC"}
    differing = [
        text
        for text, expected in vectors(name)
        if tokenizer(name).encode(text, add_special_tokens=False).ids != expected
    ]
    decomposed = [text for text, _ in vectors(name) if text != unicodedata.normalize("NFC", text)]
    assert differing == decomposed
    assert len(differing) == (3 if name == "qwen35" else 0)


@cache
def known_hashes() -> dict[str, set[str]]:
    source = (llama_cpp_source() / "conversion/base.py").read_text(encoding="utf-8")
    pattern = r'if chkhsh == "([0-9a-f]{64})":\n(?:\s*#.*\n)*\s*res = "([^"]+)"'
    known: dict[str, set[str]] = {}
    for digest, name in re.findall(pattern, source):
        known.setdefault(digest, set()).add(name)
    assert len(known) > 80
    return known


def check_text() -> str:
    source = (llama_cpp_source() / "conversion/base.py").read_text(encoding="utf-8")
    return ast.literal_eval(re.search(r"chktxt = ('.*')\n", source)[1])


@pytest.mark.parametrize("name", [name for name in BYTE_PAIR if name != "qwen35"])
def test_the_converter_recognises_the_tokenizer(name: str) -> None:
    ids = tokenizer(name).encode(check_text()).ids
    recognised = known_hashes()[hashlib.sha256(str(ids).encode()).hexdigest()]
    assert metadata(name)["tokenizer.ggml.pre"] in recognised


def test_no_slot_of_padding_is_written() -> None:
    for name, size in (("qwen2", 151646), ("phi-3", 32011), ("command-r", 255029), ("mpt", 50277)):
        texts = files(name).tokenizer_json["model"]["vocab"]
        assert len(texts) == size
        assert max(texts.values()) == size - 1
        assert not any(text.startswith("[PAD") for text in texts)
