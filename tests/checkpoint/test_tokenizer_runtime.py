"""The written tokenizers against llama.cpp's own, run on the same files."""

import re
import unicodedata
from collections.abc import Iterator

import pytest

from tests.checkpoint.vocabularies import (
    RuntimeVocabulary,
    files,
    metadata,
    path,
    runtime,
    seconds,
    texts,
    tokenizer,
    uncomposed,
)

SPACE = "\u2581"
# A special token that swallows white space swallows that of ASCII only in llama.cpp.
OTHER_SPACE_AFTER_SPECIAL = re.compile(r">\s*[^\S\x00-\x7f]")
DECOMPOSING = ("bert-bge", "nomic-bert-moe")


def comparable(name: str, text: str) -> bool:
    if name in DECOMPOSING:
        # Both take characters apart, llama.cpp by tables of one character each.
        # The original gives up on words of more than 100 characters.
        return unicodedata.normalize("NFKD", text) == text and len(text) < 100
    return name != "phi-3" or not OTHER_SPACE_AFTER_SPECIAL.search(text)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("smollm2", 500),
        ("gemma3", 400),
        ("llama-spm", 300),
        ("phi-3", 300),
        ("baichuan", 200),
        ("bert-bge", 300),
        ("nomic-bert-moe", 150),
    ],
)
def test_ids_are_those_of_llama_cpp(name: str, count: int) -> None:
    added = [token["content"] for token in files(name).tokenizer_json["added_tokens"]]
    compared, wrong = 0, []
    with runtime(path(name)) as original, uncomposed(name) as written:
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


@pytest.fixture(scope="module")
def gemma() -> Iterator[RuntimeVocabulary]:
    with runtime(path("gemma3")) as vocabulary:
        yield vocabulary


def test_each_token_of_gemma_is_found_by_its_own_text(gemma: RuntimeVocabulary) -> None:
    """All kinds: control, user-defined, runs of spaces and of line ends, single letters, words."""
    tokens = metadata("gemma3")["tokenizer.ggml.tokens"]
    for token in (*range(110, 175), *range(0, len(tokens), 97)):
        text = tokens[token].replace(SPACE, " ")
        assert tokenizer("gemma3").encode(text).ids == gemma.tokenize(text, True)


def test_gemmas_runs_of_spaces_are_spelled_as_before_conversion(gemma: RuntimeVocabulary) -> None:
    assert metadata("gemma3")["tokenizer.ggml.tokens"][140] == "    "
    spelled = files("gemma3").tokenizer_json["model"]["vocab"]
    assert spelled[SPACE * 4] == 140
    assert "    " not in spelled
    written = tokenizer("gemma3")
    for length in range(1, 100):
        text = "x" + " " * length + "y"
        ids = written.encode(text, add_special_tokens=False).ids
        assert ids == gemma.tokenize(text, False)
        assert written.decode(ids) == text


def test_decoding_gives_the_text_back() -> None:
    for name in ("smollm2", "gemma3", "llama-spm"):
        written = tokenizer(name)
        for text in texts(200):
            ids = written.encode(text, add_special_tokens=False).ids
            assert written.decode(ids, skip_special_tokens=False) == text


def test_a_large_vocabulary_is_built_in_seconds() -> None:
    assert len(files("gemma3").tokenizer_json["model"]["vocab"]) == 262144
    assert seconds["gemma3"] < 12  # 3 s where nothing else runs


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
