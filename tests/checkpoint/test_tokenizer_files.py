"""What stands in the files, on vocabularies small enough to read."""

import json

import numpy as np
import pytest

from gguf2st.checkpoint.sentencepiece import derive_merges
from gguf2st.checkpoint.tokenizer import TokenizerFiles, build_tokenizer
from tests.checkpoint.small import (
    CONTROL,
    NORMAL,
    SPACE,
    UNUSED,
    USER_DEFINED,
    byte_pair,
    scored,
)
from tests.checkpoint.vocabularies import load


def build(metadata, vocab_size=None, max_length=None) -> TokenizerFiles:
    return build_tokenizer(metadata, vocab_size=vocab_size, max_length=max_length)


def encode(metadata, text: str, add_special: bool = False) -> list[str]:
    return load(build(metadata).tokenizer_json).encode(text, add_special_tokens=add_special).tokens


def test_control_and_user_defined_tokens_are_added_tokens() -> None:
    metadata = byte_pair(("<|a|>", CONTROL), ("<b>", USER_DEFINED), ("[PAD262]", UNUSED))
    built = build(metadata, max_length=4096)
    added = built.tokenizer_json["added_tokens"]
    assert [(token["id"], token["content"], token["special"]) for token in added] == [
        (260, "<|a|>", True),
        (261, "<b>", False),
    ]
    assert not any(token["normalized"] for token in added)
    assert "[PAD262]" not in built.tokenizer_json["model"]["vocab"]
    config = built.tokenizer_config
    assert config["added_tokens_decoder"]["261"] == {
        "content": "<b>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    assert config["additional_special_tokens"] == ["<|a|>"]
    assert config["model_max_length"] == 4096
    assert config["clean_up_tokenization_spaces"] is False
    assert encode(metadata, "hello<b>hello<|a|>") == ["hello", "<b>", "hello", "<|a|>"]


def test_older_files_mark_padding_otherwise() -> None:
    metadata = byte_pair(("[PAD260]", USER_DEFINED), ("[PAD7]", USER_DEFINED), ("[PAD262]", NORMAL))
    vocabulary = build(metadata).tokenizer_json["model"]["vocab"]
    assert "[PAD260]" not in vocabulary
    assert {"[PAD7]", "[PAD262]"} <= vocabulary.keys()


def test_a_token_with_a_role_is_added_even_if_it_is_marked_as_text() -> None:
    built = build(byte_pair(("<eos>", NORMAL), eos_token_id=260))
    assert built.tokenizer_json["added_tokens"][0]["special"]
    assert built.tokenizer_config["eos_token"] == "<eos>"


def test_a_token_that_looks_like_the_end_of_a_turn_is_control() -> None:
    built = build(byte_pair(("<|im_end|>", NORMAL)))
    assert built.tokenizer_json["added_tokens"][0]["content"] == "<|im_end|>"
    assert "token 260 '<|im_end|>' is marked as text" in built.warnings[0]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["hello"]),
        ({"add_bos_token": True, "bos_token_id": 260}, ["<|b|>", "hello"]),
        ({"add_eos_token": True, "eos_token_id": 260}, ["hello", "<|b|>"]),
        ({"pre": "llama-bpe", "bos_token_id": 260}, ["<|b|>", "hello"]),
        ({"pre": "llama-bpe", "bos_token_id": 260, "add_bos_token": False}, ["hello"]),
        ({"pre": "tekken", "bos_token_id": 260}, ["<|b|>", "hello"]),
    ],
)
def test_tokens_are_added_to_a_text_as_llama_cpp_does(keys, expected) -> None:
    metadata = byte_pair(("<|b|>", CONTROL), **keys)
    assert encode(metadata, "hello", add_special=True) == expected
    config = build(metadata).tokenizer_config
    assert (config["add_bos_token"], config["add_eos_token"]) == (
        expected[0] == "<|b|>",
        expected[-1] == "<|b|>",
    )


def test_pairs_of_texts() -> None:
    decoder = scored(add_eos_token=True)
    roberta = byte_pair(
        ("<s>", CONTROL),
        ("</s>", CONTROL),
        pre="roberta-bpe",
        bos_token_id=260,
        eos_token_id=261,
        add_bos_token=True,
        add_eos_token=True,
    )
    for metadata, expected in (
        (decoder, "<s> A </s> <s> B </s>"),
        (roberta, "<s> A </s> </s> B </s>"),
    ):
        pair = build(metadata).tokenizer_json["post_processor"]["pair"]
        names = [next(iter(step.values()))["id"] for step in pair]
        assert " ".join(names) == expected


def test_a_missing_token_to_add_is_only_noted() -> None:
    built = build(byte_pair(add_bos_token=True))
    assert built.tokenizer_config["add_bos_token"] is False
    assert "asks to add a bos token" in built.warnings[0]


def test_default_ids_hold_only_for_tokens_that_are_no_text() -> None:
    assert build(scored()).tokenizer_config["eos_token"] == "</s>"
    assert build(byte_pair()).tokenizer_config["eos_token"] is None  # 11 is a comma there


def test_words_that_are_tokens_stand_without_merges() -> None:
    metadata = byte_pair(("hex", NORMAL), pre="llama-bpe", add_bos_token=False)
    assert encode(metadata, "hex") == ["hex"]
    assert encode(metadata | {"tokenizer.ggml.pre": "dbrx"}, "hex") == ["he", "x"]


def test_a_merge_may_begin_with_a_space() -> None:
    metadata = byte_pair((" ", NORMAL), (" x", NORMAL), merges=["  x"], pre="sarvam-moe")
    assert build(metadata).tokenizer_json["model"]["merges"] == [(" ", "x")]


def test_merges_without_a_token_are_left_out() -> None:
    built = build(byte_pair(merges=["h e", "q q", "nospace", "l l"]))
    assert built.tokenizer_json["model"]["merges"] == [("h", "e"), ("l", "l")]
    assert "2 of 4 merges name a token that the vocabulary lacks" in built.warnings[0]


def test_scores_rank_merges_and_unknown_text_falls_back_to_bytes() -> None:
    assert encode(scored(), "hello hello") == [SPACE + "hello", SPACE + "hello"]
    assert encode(scored(), "\u00e9") == [SPACE, "<0xC3>", "<0xA9>"]
    assert encode(scored(add_space_prefix=False), "hello") == ["hello"]


def test_equal_scores_are_ranked_by_id() -> None:
    pieces = ["a", "b", "c", "bc", "ab", "abc"]
    assert derive_merges(pieces, [-1000.0] * 6) == [
        ("b", "c"),
        ("a", "b"),
        ("ab", "c"),
        ("a", "bc"),
    ]
    assert derive_merges(pieces, [0, 0, 0, -2, -1, -3])[0] == ("a", "b")


def test_a_very_long_piece_costs_nothing() -> None:
    pieces = ["a", "a" * 100_000]
    assert derive_merges(pieces, [0.0, -1.0]) == []


def test_runs_of_spaces_are_found_longest_first() -> None:
    runs = [(" " * length, USER_DEFINED, 0.0) for length in (2, 3, 4)]
    metadata = scored(*runs, add_space_prefix=False)
    assert encode(metadata, "hello" + " " * 7 + "hello") == [
        "hello",
        SPACE * 4,
        SPACE * 3,
        "hello",
    ]
    # With a gap they can't grow, so they stay as the file spells them.
    gap = scored(*runs[1:], add_space_prefix=False)
    assert encode(gap, " " * 7) == ["    ", "   "]


def test_phi3_tokens_swallow_the_space_after_them() -> None:
    metadata = scored(("<|user|>", CONTROL, 0.0)) | {"general.name": "Phi-3 mini"}
    added = {token["content"]: token for token in build(metadata).tokenizer_json["added_tokens"]}
    assert added["<|user|>"]["rstrip"]
    assert added["</s>"]["rstrip"]
    assert not added["<s>"]["rstrip"]


def test_tokens_that_are_not_utf8_are_left_out() -> None:
    built = build(byte_pair((b"\xff\xfe".decode("utf-8", "surrogateescape"), NORMAL)))
    json.dumps(built.tokenizer_json, ensure_ascii=False).encode()
    assert "1 tokens aren't valid UTF-8 (the first has the id 260)" in built.warnings[0]


def test_a_file_without_token_types() -> None:
    metadata = scored()
    del metadata["tokenizer.ggml.token_type"]
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.unknown_token_id": 0}
    built = build(metadata)
    assert [token["content"] for token in built.tokenizer_json["added_tokens"]] == ["<unk>", "<s>"]
    assert encode(metadata, "\u00e9") == [SPACE, "<0xC3>", "<0xA9>"]


def test_unigram_with_sentinels() -> None:
    texts = ["<pad>", "</s>", "<unk>", SPACE, "hello", SPACE + "hello"]
    slots = [f"[PAD{number}]" for number in range(6, 118)]
    metadata = {
        "general.architecture": "t5",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": texts + slots,
        "tokenizer.ggml.token_type": np.array([3, 3, 2, 1, 1, 1] + [5] * len(slots), np.int32),
        "tokenizer.ggml.scores": np.array([0, 0, 0, -2, -3, -1] + [-1e4] * 112, np.float32),
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.add_space_prefix": True,
    }
    assert encode(metadata, "hello  hello<extra_id_0>", add_special=True) == [
        SPACE + "hello",
        SPACE + "hello",
        "<extra_id_0>",
        "</s>",
    ]
    vocabulary = dict(
        (text, token)
        for token, (text, _) in enumerate(build(metadata).tokenizer_json["model"]["vocab"])
    )
    assert (vocabulary["<extra_id_99>"], vocabulary["<extra_id_0>"]) == (6, 105)
    assert len(vocabulary) == 106


def test_a_unigram_token_that_is_not_utf8_keeps_its_place() -> None:
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "\udcff", "", "hello"],
        "tokenizer.ggml.token_type": np.array([3, 3, 2, 1, 1, 1], np.int32),
        "tokenizer.ggml.scores": np.zeros(6, np.float32),
    }
    vocabulary = build(metadata).tokenizer_json["model"]["vocab"]
    assert [text for text, _ in vocabulary[3:]] == ["[NONE3]", "[NONE4]", "hello"]


def test_a_tokenizer_json_in_the_file_is_written_as_it_is() -> None:
    original = build(byte_pair(("<|end|>", CONTROL), ("<think>", USER_DEFINED))).tokenizer_json
    original = json.loads(json.dumps(original | {"normalizer": {"type": "Lowercase"}}))
    metadata = byte_pair(("<|end|>", CONTROL), eos_token_id=260)
    metadata["tokenizer.huggingface.json"] = json.dumps(original)
    built = build(metadata, vocab_size=300)
    assert built.tokenizer_json == original
    assert built.tokenizer_config["eos_token"] == "<|end|>"
    assert set(built.tokenizer_config["added_tokens_decoder"]) == {"260", "261"}
