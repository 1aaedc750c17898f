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
from gguf2st.checkpoint.vocabulary import (
    ANOTHER_TOKENIZER,
    TokenType,
    Vocabulary,
    flag,
    read_vocabulary,
)
from gguf2st.errors import InputError, UnsupportedError

# Architectures whose processors look for the placeholders of images and videos.
_VISION_ARCHITECTURES = frozenset(("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"))
_VISION_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
_RESERVED = re.compile("unused|reserved|placeholder|<extra_id_", re.IGNORECASE)


@dataclass(frozen=True)
class TokenizerFiles:
    """What to write: `tokenizer.json` and `tokenizer_config.json` as JSON data.

    `warnings` are sentences for the report: what was odd in the file, and where
    the result may differ from the original's tokenizer.
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
    if "tokenizer.huggingface.json" in metadata:
        return _verbatim(metadata, max_length, warnings)
    vocabulary = read_vocabulary(metadata, warnings)
    _check_size(vocabulary, vocab_size)
    pre = _pre_tokenizer(metadata, vocabulary, warnings)
    pipeline = _pipeline(metadata, vocabulary, pre, warnings)
    adds = _added_ends(metadata, vocabulary, pre, warnings)
    added = _added_tokens(metadata, vocabulary, pipeline)
    tokenizer_json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": pipeline.normalizer,
        "pre_tokenizer": pipeline.pre_tokenizer,
        "post_processor": _post_processor(vocabulary, pre, adds),
        "decoder": pipeline.decoder,
        "model": pipeline.model,
    }
    names = {role: vocabulary.role(role) for role in ("bos", "eos", "unk", "sep", "pad", "mask")}
    if vocabulary.model in ("bert", "t5") and names["sep"] is not None:
        names["cls"] = vocabulary.role("cls") or names["bos"]
    if vocabulary.model == "bert":
        names["bos"] = names["eos"] = None
    config = _config(metadata, added, names, max_length)
    config |= {"add_bos_token": adds[0], "add_eos_token": adds[1]}
    return TokenizerFiles(tokenizer_json, config, warnings)


def _check_size(vocabulary: Vocabulary, vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    last = max(
        (token for token in range(len(vocabulary.tokens)) if token not in vocabulary.absent),
        default=-1,
    )
    if last >= vocab_size:
        raise InputError(
            f"The vocabulary has a token with the id {last:,} (tokenizer.ggml.tokens) but the "
            f"embedding has only {vocab_size:,} rows; the file's parts don't belong together."
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
            "The file doesn't say how text is cut into words (tokenizer.ggml.pre), so llama.cpp's "
            f"fallback is used, which may cut worse than the original; {ANOTHER_TOKENIZER}."
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


def _added_tokens(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, pipeline: Pipeline
) -> list[Json]:
    """Tokens that are found in a text before anything else, by id.

    The named ones are among them whatever their type, because transformers
    would add them when it loads the files.
    """
    named = {
        token
        for role, token in vocabulary.roles.items()
        if role not in ("eot", "eom") and token not in vocabulary.absent
    }
    special = {*vocabulary.ids(TokenType.CONTROL, TokenType.UNKNOWN), *named}
    if vocabulary.model == "t5":
        special.update(
            token for text, token in pipeline.tokens.items() if text.startswith("<extra_id_")
        )
    texts = {token: text for text, token in pipeline.tokens.items()}
    left, right = _stripping_tokens(metadata, vocabulary, special)
    return [
        {
            "id": token,
            "content": texts[token],
            "single_word": False,
            "lstrip": token in left,
            "rstrip": token in right,
            "normalized": False,
            "special": token in special,
        }
        for token in sorted(special.union(vocabulary.ids(TokenType.USER_DEFINED)))
        if token in texts
    ]


def _stripping_tokens(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, special: set[int]
) -> tuple[set[int], set[int]]:
    """Ids of tokens that swallow white space to their left and right.

    A GGUF doesn't say; the same guesses stand at the end of
    `llama_vocab::impl::load`.
    """
    name = str(metadata.get("general.name", "")).lower()
    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    architecture = str(metadata.get("general.architecture", ""))
    if "phi-3" in name or "phi3" in name:
        keeps = ("<unk>", "<s>", "<|endoftext|>")
        users = vocabulary.ids(TokenType.USER_DEFINED)
        return set(), {
            token for token in special.union(users) if vocabulary.tokens[token] not in keeps
        }
    if pre.startswith("jina-v2-") or architecture in ("nomic-bert-moe", "jina-bert-v3"):
        mask = "<mask>"
    elif pre == "modern-bert" or "modern-bert" in name:
        mask = "[MASK]"
    else:
        return set(), set()
    return {token for token in special if vocabulary.tokens[token] == mask}, set()


def _added_ends(
    metadata: Mapping[str, Any],
    vocabulary: Vocabulary,
    pre: PreTokenizer | None,
    warnings: list[str],
) -> tuple[bool, bool]:
    """Whether a beginning and an end token are added to a text."""
    if vocabulary.model == "bert":
        return True, True
    by_default = {"llama": (True, False), "t5": (False, True)}
    bos, eos = by_default.get(vocabulary.model, (pre is not None and pre.add_bos, False))
    if pre is None or pre.byte_level or not pre.add_bos:
        bos = flag(metadata, "add_bos_token", bos)
    # else Gemma 4's layout: llama.cpp adds the token there even if the file says no.
    eos = flag(metadata, "add_eos_token", eos)
    for wanted, role in ((bos, "bos"), (eos, "eos")):
        if wanted and vocabulary.role(role) is None:
            warnings.append(
                f"The file asks to add a {role} token (tokenizer.ggml.add_{role}_token) but names "
                "none; nothing is added."
            )
    return bos and vocabulary.role("bos") is not None, eos and vocabulary.role("eos") is not None


def _post_processor(
    vocabulary: Vocabulary, pre: PreTokenizer | None, adds: tuple[bool, bool]
) -> Json | None:
    first, last = "bos", "sep" if vocabulary.model == "bert" else "eos"
    if vocabulary.model == "bert" and vocabulary.role("bos") is None:
        first = "cls"
    before = [vocabulary.role(first)] if adds[0] else []
    after = [vocabulary.role(last)] if adds[1] else []
    if vocabulary.model == "bert":
        between = after
    elif (pre is not None and pre.double_separator) or (vocabulary.model == "t5" and before):
        between = after + after
    else:
        between = after + before
    ends = {first: before, last: after}
    special_tokens = {
        text: {"id": text, "ids": [vocabulary.roles[role]], "tokens": [text]}
        for role, texts in ends.items()
        for text in texts
        if text is not None
    }
    if not special_tokens:
        # Unlike none at all, this keeps transformers from making its own.
        return (
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            }
            if pre is not None and pre.byte_level
            else None
        )
    one: Json = {"Sequence": {"id": "A", "type_id": 0}}
    two: Json = {"Sequence": {"id": "B", "type_id": 1}}

    def special(texts: list[str | None], segment: int) -> list[Json]:
        return [{"SpecialToken": {"id": text, "type_id": segment}} for text in texts]

    middle = special(after, 0) + special(between[len(after) :], 1)
    return {
        "type": "TemplateProcessing",
        "single": [*special(before, 0), one, *special(after, 0)],
        "pair": [*special(before, 0), one, *middle, two, *special(after, 1)],
        "special_tokens": special_tokens,
    }


def _config(
    metadata: Mapping[str, Any],
    added: list[Json],
    names: Mapping[str, str | None],
    max_length: int | None,
) -> Json:
    """`tokenizer_config.json`.

    The class is the generic one, because it takes `tokenizer.json` as it is;
    LlamaTokenizer, GPT2Tokenizer and others make their own from the vocabulary.
    Roles without a token are written as null, or such a class would add the
    token that it is used to.
    """
    config: Json = {f"{role}_token": text for role, text in names.items()}
    for role in ("sep", "mask"):
        if names.get(role) is None:
            config.pop(f"{role}_token", None)
    named = set(names.values())
    config |= {
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in added
        },
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    others = [
        token["content"]
        for token in added
        if token["special"]
        and token["content"] not in named
        and not _RESERVED.search(token["content"])
    ]
    if others:
        config["additional_special_tokens"] = others
    if max_length is not None:
        config["model_max_length"] = max_length
    if metadata.get("general.architecture") in _VISION_ARCHITECTURES:
        present = {token["content"] for token in added}
        config |= {key: text for key, text in _VISION_TOKENS.items() if text in present}
    return config


def _verbatim(
    metadata: Mapping[str, Any], max_length: int | None, warnings: list[str]
) -> TokenizerFiles:
    """The files of a GGUF that carries a whole `tokenizer.json`."""
    key = "tokenizer.huggingface.json"
    try:
        tokenizer_json = json.loads(metadata[key])
        added = list(tokenizer_json["added_tokens"])
        texts = {int(token["id"]): str(token["content"]) for token in added}
        special = [bool(token["special"]) for token in added]
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise InputError(
            f"The key {key} doesn't hold a tokenizer.json ({type(error).__name__}: {error!s:.80}); "
            f"{ANOTHER_TOKENIZER}."
        ) from error
    warnings.append(f"tokenizer.json is written as the key {key} holds it.")
    assert len(special) == len(added)
    names = {}
    for role, suffix in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        names[role] = texts.get(metadata.get(f"tokenizer.ggml.{suffix}_token_id", -1))
    return TokenizerFiles(tokenizer_json, _config(metadata, added, names, max_length), warnings)
