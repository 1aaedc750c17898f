"""transformers loads the files as they are, whatever class it insists on."""

import json
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gguf2st.checkpoint.tokenizer import build_tokenizer
from tests.checkpoint.small import CONTROL, NORMAL, USER_DEFINED, byte_pair, scored
from tests.checkpoint.vocabularies import files, load, texts, tokenizer, write


def assert_same(folder: Path, expected) -> None:
    loaded = AutoTokenizer.from_pretrained(folder)
    backend = json.loads(loaded.backend_tokenizer.to_str())
    original = json.loads(expected.to_str())
    for content in (backend, original):
        # Some classes write no affix as an empty text.
        for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
            content["model"][affix] = content["model"].get(affix) or None
    assert backend == original
    assert len(loaded) == expected.get_vocab_size()
    special = [token["content"] for token in original["added_tokens"]][:40]
    for text in texts(40, special or ["x"]):
        ids = expected.encode(text).ids
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == expected.decode(ids, skip_special_tokens=False)
        assert loaded.decode(ids, skip_special_tokens=True) == expected.decode(ids)


@pytest.mark.parametrize("name", ["smollm2", "llama-spm"])
def test_real_vocabularies(name: str, tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert_same(write(tmp_path, files(name), model_type="llama"), tokenizer(name))
    assert not caplog.records


def test_a_large_vocabulary_is_not_taken_for_a_broken_one(tmp_path: Path, caplog) -> None:
    """transformers warns about vocabularies of more than 100,000 tokens that say nothing."""
    more = ((f"word{number}", NORMAL) for number in range(100_000))
    built = build_tokenizer(byte_pair(*more), vocab_size=None, max_length=64)
    assert built.tokenizer_config["fix_mistral_regex"] is False
    with caplog.at_level(logging.WARNING):
        AutoTokenizer.from_pretrained(write(tmp_path, built, model_type="llama"))
    assert not caplog.records


# Model types for which transformers takes a class of its own even if the files name another.
@pytest.mark.parametrize(
    ("model_type", "pre"),
    [
        ("qwen2", "qwen2"),
        ("qwen2", "deepseek-r1-qwen"),
        ("qwen3", "qwen2"),
        ("qwen3_vl", "qwen2"),
        ("qwen3_5", "qwen35"),
        ("qwen3_5_moe", "qwen35"),
        ("qwen3_5_moe_text", "qwen35"),
        ("deepseek_v3", "deepseek-v3"),
        ("gpt2", "gpt-2"),
        ("cohere", "command-r"),
        ("llama", "llama-bpe"),
        ("mistral", "tekken"),
    ],
)
@pytest.mark.parametrize("names_eos", [True, False])
def test_byte_pair_vocabularies(model_type: str, pre: str, names_eos: bool, tmp_path: Path) -> None:
    keys = {"eos_token_id": 261, "bos_token_id": 260} if names_eos else {}
    metadata = byte_pair(
        ("<|b|>", CONTROL), ("<|e|>", CONTROL), ("<t>", USER_DEFINED), pre=pre, **keys
    )
    built = build_tokenizer(metadata, vocab_size=300, max_length=64)
    assert_same(write(tmp_path, built, model_type=model_type), load(built.tokenizer_json))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi3", "gemma2", "internlm2"])
def test_sentencepiece_vocabularies(model_type: str, tmp_path: Path) -> None:
    name = {"general.name": "Phi-3"} if model_type == "phi3" else {}
    metadata = scored(("<|user|>", CONTROL, 0.0), ("<t>", USER_DEFINED, 0.0)) | name
    built = build_tokenizer(metadata, vocab_size=300, max_length=64)
    assert_same(write(tmp_path, built, model_type=model_type), load(built.tokenizer_json))


def test_roles_and_limits_arrive(tmp_path: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(write(tmp_path, files("smollm2"), model_type="llama"))
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    assert loaded.unk_token == "<|endoftext|>"
    assert loaded.model_max_length == 1024
    assert len(loaded.all_special_tokens) == 17
    assert loaded.decode([2, 28120], skip_special_tokens=True) == loaded.decode([28120])
