"""The written tokenizers against llama.cpp's own, run on the same files."""

import re
import time
import unicodedata

import pytest

from gguf2st.checkpoint.tokenizer import build_tokenizer
from tests.checkpoint.vocabularies import files, metadata, path, runtime, texts, tokenizer

SPACE = "\u2581"
# Where llama.cpp is known to differ from the tokenizer that it imitates.
KNOWN = {
    # Its \s is that of C++, and it maps other white space to U+000B beforehand.
    "deepseek-llm": re.compile(r"[^\S\x00-\x7f]"),
    "deepseek-coder": re.compile(r"[^\S\x00-\x7f]"),
    # A special token that swallows white space swallows that of ASCII only.
    "phi-3": re.compile(r">\s*[^\S\x00-\x7f]"),
}
DECOMPOSING = ("bert-bge", "nomic-bert-moe")


def comparable(name: str, text: str) -> bool:
    if name in DECOMPOSING:
        # Both take characters apart, llama.cpp by tables of one character each.
        return unicodedata.normalize("NFKD", text) == text
    return name not in KNOWN or not KNOWN[name].search(text)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("smollm2", 800),
        ("gemma3", 800),
        ("llama-spm", 400),
        ("phi-3", 400),
        ("baichuan", 300),
        ("gpt-neox", 300),
        ("falcon", 200),
        ("deepseek-coder", 200),
        ("deepseek-llm", 200),
        ("starcoder", 200),
        ("llama-bpe", 200),
        ("qwen2", 200),
        ("qwen35", 200),
        ("gemma-4", 200),
        ("bert-bge", 300),
        ("nomic-bert-moe", 300),
    ],
)
def test_ids_are_those_of_llama_cpp(name: str, count: int) -> None:
    written = tokenizer(name, composed=False)
    added = [token["content"] for token in files(name).tokenizer_json["added_tokens"]]
    compared, wrong = 0, []
    with runtime(path(name)) as original:
        for text in texts(count, added[:60]):
            if not comparable(name, text):
                continue
            for add_special in (False, True):
                expected = original.tokenize(text, add_special)
                found = written.encode(text, add_special_tokens=add_special).ids
                compared += 1
                if found != expected:
                    wrong.append((text, expected, found))
    assert not wrong
    assert compared > count


def test_each_token_of_gemma_is_found_by_its_own_text() -> None:
    """All kinds: control, user-defined, runs of spaces and of line ends, single letters, words."""
    tokens = metadata("gemma3")["tokenizer.ggml.tokens"]
    chosen = range(0, len(tokens), 61)
    written = tokenizer("gemma3")
    with runtime(path("gemma3")) as original:
        for token in (*range(110, 175), *chosen):
            text = tokens[token].replace(SPACE, " ")
            assert written.encode(text).ids == original.tokenize(text, True)


def test_gemmas_runs_of_spaces_are_spelled_as_before_conversion() -> None:
    spelled = tokenizer("gemma3").get_vocab()
    assert metadata("gemma3")["tokenizer.ggml.tokens"][140] == "    "
    assert spelled[SPACE * 4] == 140
    assert not any(text.isspace() and text.strip("\n\t") for text in spelled)
    with runtime(path("gemma3")) as original:
        for length in range(1, 100):
            text = "x" + " " * length + "y"
            found = tokenizer("gemma3").encode(text, add_special_tokens=False)
            assert found.ids == original.tokenize(text, False)
            assert tokenizer("gemma3").decode(found.ids) == text


def test_decoding_gives_the_text_back() -> None:
    for name in ("smollm2", "gemma3", "llama-spm"):
        written = tokenizer(name)
        for text in texts(200):
            ids = written.encode(text, add_special_tokens=False).ids
            assert written.decode(ids, skip_special_tokens=False) == text


def test_a_large_vocabulary_is_built_in_seconds() -> None:
    content = dict(metadata("gemma3"))
    start = time.process_time()
    built = build_tokenizer(content, vocab_size=262144, max_length=None)
    assert time.process_time() - start < 10  # 3 s, on a busy machine
    assert len(built.tokenizer_json["model"]["vocab"]) == 262144


def test_merges_from_scores_are_those_of_transformers() -> None:
    from transformers.tokenization_utils_base import generate_merges

    content = metadata("llama-spm")
    tokens, types = content["tokenizer.ggml.tokens"], content["tokenizer.ggml.token_type"]
    scores = content["tokenizer.ggml.scores"]
    normal = {tokens[n]: float(scores[n]) for n in range(len(tokens)) if types[n] == 1}
    others = [text for text in tokens if text not in normal]
    vocabulary = {text: number for number, text in enumerate(tokens)}
    expected = generate_merges(vocabulary, normal, skip_tokens=others)
    assert files("llama-spm").tokenizer_json["model"]["merges"] == expected
