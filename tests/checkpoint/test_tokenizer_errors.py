"""Keys that are missing, damaged or contradictory, and kinds that can't be written."""

import json

import numpy as np
import pytest

from gguf2st.checkpoint.tokenizer import build_tokenizer
from gguf2st.errors import InputError, UnsupportedError
from tests.checkpoint.small import CONTROL, NORMAL, byte_pair, scored

PREFIX = "tokenizer.ggml."


def changed(base, **keys):
    metadata = dict(base)
    for name, value in keys.items():
        if value is None:
            metadata.pop(PREFIX + name, None)
        else:
            metadata[PREFIX + name] = value
    return metadata


NAN = scored()[PREFIX + "scores"].copy()
NAN[5] = np.nan
TWICE = changed(byte_pair(), tokens=[*byte_pair()[PREFIX + "tokens"][:-1], "he"])
UNIGRAM = changed(
    byte_pair(("<unk>", CONTROL)),
    model="t5",
    unknown_token_id=260,
    scores=np.zeros(261, np.float32),
)
DAMAGED = {
    "no tokenizer": ({}, "tokenizer.ggml.model is missing"),
    "model is a number": (changed(byte_pair(), model=3), "tokenizer.ggml.model is missing"),
    "no tokens": (changed(byte_pair(), tokens=None), "empty or missing (tokenizer.ggml.tokens)"),
    "empty tokens": (changed(byte_pair(), tokens=[]), "empty or missing (tokenizer.ggml.tokens)"),
    "tokens are text": (changed(byte_pair(), tokens="a"), "must hold an array of strings"),
    "no merges": (changed(byte_pair(), merges=None), "tokenizer.ggml.merges is missing or empty"),
    "merges are numbers": (
        changed(byte_pair(), merges=np.arange(3)),
        "tokenizer.ggml.merges must hold an array of strings",
    ),
    "too few types": (
        changed(byte_pair(), token_type=np.ones(10, np.int32)),
        "has 260 tokens but tokenizer.ggml.token_type has 10 items",
    ),
    "types are texts": (
        changed(byte_pair(), token_type=["1"] * 260),
        "tokenizer.ggml.token_type must hold an array of numbers",
    ),
    "unknown type": (
        changed(byte_pair(), token_type=np.full(260, 9, np.int32)),
        "Token 0 has the type 9",
    ),
    "too many scores": (
        changed(scored(), scores=np.zeros(999, np.float32)),
        "tokenizer.ggml.scores has 999 items",
    ),
    "score is no number": (changed(scored(), scores=NAN), "Token 5 has the score nan"),
    "id beyond the vocabulary": (
        changed(byte_pair(), eos_token_id=260),
        "tokenizer.ggml.eos_token_id is 260, which is no id of the 260 tokens",
    ),
    "id is a text": (changed(byte_pair(), bos_token_id="<s>"), "bos_token_id is '<s>'"),
    "id is negative": (changed(byte_pair(), padding_token_id=-5), "padding_token_id is -5"),
    "a token twice": (TWICE, "tokens 256 and 259 are both 'he'"),
    "flag is a text": (
        changed(byte_pair(), add_bos_token="yes"),
        "tokenizer.ggml.add_bos_token must be true or false, not 'yes'",
    ),
    "no unknown word": (
        changed(byte_pair(), model="bert", unknown_token_id=None),
        "tokenizer.ggml.unknown_token_id",
    ),
    "unigram without scores": (
        changed(byte_pair(("<unk>", CONTROL)), model="t5", unknown_token_id=260),
        "has no tokenizer.ggml.scores",
    ),
    "character map is short": (
        changed(UNIGRAM, precompiled_charsmap=np.zeros(3, np.uint8)),
        "precompiled_charsmap doesn't hold a character map",
    ),
    "character map points beyond": (
        changed(UNIGRAM, precompiled_charsmap=np.full(64, 255, np.uint8)),
        "precompiled_charsmap doesn't hold a character map",
    ),
    "character map is a text": (
        changed(UNIGRAM, precompiled_charsmap="abc"),
        "precompiled_charsmap doesn't hold a character map",
    ),
    "tokenizer.json is none": (
        byte_pair() | {"tokenizer.huggingface.json": "{"},
        "tokenizer.huggingface.json doesn't hold a tokenizer.json",
    ),
    "tokenizer.json is a list": (
        byte_pair() | {"tokenizer.huggingface.json": "[]"},
        "tokenizer.huggingface.json doesn't hold a tokenizer.json",
    ),
    "tokenizer.json is a number": (
        byte_pair() | {"tokenizer.huggingface.json": 3},
        "tokenizer.huggingface.json doesn't hold a tokenizer.json",
    ),
    "tokenizer.json is bottomless": (
        byte_pair() | {"tokenizer.huggingface.json": "[" * 100_000},
        "tokenizer.huggingface.json doesn't hold a tokenizer.json",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_vocabulary_is_refused_in_one_sentence(case: str) -> None:
    metadata, expected = DAMAGED[case]
    with pytest.raises(InputError) as caught:
        build_tokenizer(metadata, vocab_size=None, max_length=None)
    message = str(caught.value)
    assert expected in message
    assert "--tokenizer-from DIR" in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("model", ["rwkv", "plamo2", "hybriddna", "whitespace", "none", "no_vocab"])
def test_kinds_that_cannot_be_written(model: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{model}.*--tokenizer-from DIR"):
        build_tokenizer(changed(byte_pair(), model=model), vocab_size=None, max_length=None)


@pytest.mark.parametrize("pre", ["from-the-future", "x" * 10_000, 7])
def test_an_unknown_pre_tokenizer_is_named(pre) -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre.*--tokenizer-from") as caught:
        build_tokenizer(changed(byte_pair(), pre=pre), vocab_size=None, max_length=None)
    assert str(pre)[:20] in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_vocabulary_larger_than_the_embedding() -> None:
    metadata = byte_pair(("[PAD260]", 5))
    build_tokenizer(metadata, vocab_size=260, max_length=None)
    with pytest.raises(InputError, match=r"id 259 .* only 259 rows"):
        build_tokenizer(metadata, vocab_size=259, max_length=None)
    metadata["tokenizer.huggingface.json"] = json.dumps(
        build_tokenizer(byte_pair(), vocab_size=None, max_length=None).tokenizer_json
    )
    with pytest.raises(InputError, match=r"id 259 .* only 100 rows"):
        build_tokenizer(metadata, vocab_size=100, max_length=None)


def test_an_id_that_stands_for_none() -> None:
    metadata = changed(byte_pair(("<|a|>", CONTROL)), padding_token_id=2**32 - 1, eos_token_id=-1)
    config = build_tokenizer(metadata, vocab_size=None, max_length=None).tokenizer_config
    assert config["pad_token"] is None
    assert config["eos_token"] is None


def test_empty_tokens_have_no_text() -> None:
    built = build_tokenizer(byte_pair(("", NORMAL), ("", NORMAL)), vocab_size=None, max_length=None)
    assert "" not in built.tokenizer_json["model"]["vocab"]
