"""A GGUF's vocabulary as `tokenizer.json` and `tokenizer_config.json`.

The files make the tokenizers library cut text as the original model's
tokenizer did, which llama.cpp imitates (`llama_vocab` in llama.cpp's
`src/llama-vocab.cpp`). What its converter left out (normalizers,
post-processors, flags of added tokens) is restored from what is known of each
kind of vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf2st.checkpoint import sentencepiece
from gguf2st.checkpoint.pipelines import Json, Pipeline, byte_level, word_piece
from gguf2st.checkpoint.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from gguf2st.checkpoint.special_tokens import added_tokens, ends_to_add, post_processor
from gguf2st.checkpoint.vocabulary import (
    ANOTHER_TOKENIZER,
    Vocabulary,
    read_roles,
    read_vocabulary,
)
from gguf2st.errors import InputError, UnsupportedError

_VERBATIM_KEY = "tokenizer.huggingface.json"
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Special tokens that no text or template has: slots kept for later use.
_RESERVED = re.compile("unused|reserved|placeholder|<extra_id_", re.IGNORECASE)


@dataclass(frozen=True)
class TokenizerFiles:
    """What to write: `tokenizer.json` and `tokenizer_config.json` as JSON data.

    `warnings` are for the report: what was odd in the file, and where the
    result may differ from the original's tokenizer.
    """

    tokenizer_json: Json
    tokenizer_config: Json
    warnings: list[str] = field(default_factory=list)


def build_tokenizer(
    metadata: Mapping[str, Any], *, vocab_size: int | None, max_length: int | None
) -> TokenizerFiles:
    """The tokenizer that the keys `tokenizer.*` of a GGUF describe.

    `vocab_size` is the number of rows of the embedding; no token may have an id
    beyond it. `max_length` is the context length, None if unknown. Raises
    `InputError` where the keys are missing, contradict each other or can't be
    right, and `UnsupportedError` for kinds of tokenizers that `tokenizer.json`
    can't express or that aren't known.
    """
    warnings: list[str] = []
    if _VERBATIM_KEY in metadata:
        return _verbatim(metadata, vocab_size, max_length)
    vocabulary = read_vocabulary(metadata, warnings)
    present = (t for t in range(len(vocabulary.tokens) - 1, -1, -1) if t not in vocabulary.absent)
    _check_size(next(present, -1), vocab_size)
    pre = _pre_tokenizer(metadata, vocabulary, warnings)
    pipeline = _pipeline(metadata, vocabulary, pre, warnings)
    ends = ends_to_add(metadata, vocabulary, pre, warnings)
    added = added_tokens(metadata, vocabulary, pipeline)
    tokenizer_json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": pipeline.normalizer,
        "pre_tokenizer": pipeline.pre_tokenizer,
        "post_processor": post_processor(vocabulary, pre, ends),
        "decoder": pipeline.decoder,
        "model": pipeline.model,
    }
    names = {role: vocabulary.role(role) for role in ("bos", "eos", "unk", "pad")}
    names |= {role: text for role in ("sep", "mask") if (text := vocabulary.role(role))}
    if vocabulary.model in ("bert", "t5") and "sep" in names:
        names["cls"] = vocabulary.role("cls") or names["bos"]
    config = _config(added, names, max_length)
    config |= {"add_bos_token": ends[0] is not None, "add_eos_token": ends[1] is not None}
    return TokenizerFiles(tokenizer_json, config, warnings)


def _check_size(last: int, vocab_size: int | None) -> None:
    if vocab_size is not None and last >= vocab_size:
        raise InputError(
            f"The vocabulary has a token with the id {last:,} but the embedding has only "
            f"{vocab_size:,} rows; the file's parts don't belong together, {ANOTHER_TOKENIZER}."
        )


def _pre_tokenizer(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, warnings: list[str]
) -> PreTokenizer | None:
    if vocabulary.model == "gemma4":
        return PRE_TOKENIZERS["gemma4"]
    if vocabulary.model != "gpt2":
        return None
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name == "default":
        warnings.append(
            "the GGUF doesn't say how text is cut into words (tokenizer.ggml.pre), so llama.cpp's "
            f"fallback is written, which may cut worse than the original; {ANOTHER_TOKENIZER}"
        )
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise UnsupportedError(
            f"The pre-tokenizer {name!r:.60} (tokenizer.ggml.pre) isn't known; {ANOTHER_TOKENIZER}."
        )
    return pre


def _pipeline(
    metadata: Mapping[str, Any],
    vocabulary: Vocabulary,
    pre: PreTokenizer | None,
    warnings: list[str],
) -> Pipeline:
    if pre is not None:
        if pre.byte_level:
            return byte_level(metadata, vocabulary, pre, warnings)
        return sentencepiece.merged_by_rank(metadata, vocabulary, warnings)
    if vocabulary.model == "bert":
        return word_piece(metadata, vocabulary)
    if vocabulary.model == "t5":
        return sentencepiece.unigram(metadata, vocabulary)
    return sentencepiece.merged_by_score(metadata, vocabulary, warnings)


def _config(added: list[Json], names: Mapping[str, str | None], max_length: int | None) -> Json:
    """`tokenizer_config.json`.

    The class is the generic one, because it takes `tokenizer.json` as it is;
    LlamaTokenizer, GPT2Tokenizer and others make their own from the vocabulary.
    Main roles without a token are written as null, or the classes that
    transformers insists on for some models (Qwen2Tokenizer) would add the
    token that they are used to.
    """
    config: Json = {f"{role}_token": text for role, text in names.items()}
    named = set(names.values())
    others = [
        token["content"]
        for token in added
        if token["special"]
        and token["content"] not in named
        and not _RESERVED.search(token["content"])
    ]
    if others:
        config["additional_special_tokens"] = others
    config |= {
        "added_tokens_decoder": {
            str(token["id"]): {"content": token["content"]}
            | {name: bool(token.get(name)) for name in _TOKEN_FLAGS}
            for token in added
        },
        "clean_up_tokenization_spaces": False,
        # Without this transformers warns that any large vocabulary is a broken one of Mistral's.
        "fix_mistral_regex": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if max_length is not None:
        config["model_max_length"] = max_length
    return config


def _verbatim(
    metadata: Mapping[str, Any], vocab_size: int | None, max_length: int | None
) -> TokenizerFiles:
    """The files of a GGUF that carries a whole `tokenizer.json`."""
    try:
        tokenizer_json = json.loads(metadata[_VERBATIM_KEY])
        added = list(tokenizer_json["added_tokens"])
        pieces = tokenizer_json["model"]["vocab"]
        texts = (
            {int(token): str(text) for text, token in pieces.items()}
            if isinstance(pieces, dict)
            else {token: str(piece[0]) for token, piece in enumerate(pieces)}
        )
        texts |= {int(token["id"]): str(token["content"]) for token in added}
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise InputError(
            f"The key {_VERBATIM_KEY} doesn't hold a tokenizer.json ({type(error).__name__}: "
            f"{error!s:.80}); {ANOTHER_TOKENIZER}."
        ) from error
    _check_size(max(texts, default=-1), vocab_size)
    roles = read_roles(metadata)
    names = {role: texts.get(roles.get(role, -1)) for role in ("bos", "eos", "unk", "pad")}
    note = f"tokenizer.json is written as the key {_VERBATIM_KEY} holds it"
    return TokenizerFiles(tokenizer_json, _config(added, names, max_length), [note])
