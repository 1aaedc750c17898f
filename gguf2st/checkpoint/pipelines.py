"""The parts of a `tokenizer.json` for each kind of vocabulary: byte-level BPE and WordPiece.

The parts are written as the JSON data that the tokenizers library reads, so
that nothing of it is needed here. The vocabularies that descend from
SentencePiece are in `sentencepiece.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf2st.checkpoint.pretokenizers import PreTokenizer
from gguf2st.checkpoint.vocabulary import (
    ANOTHER_TOKENIZER,
    TokenType,
    Vocabulary,
    flag,
    string_array,
)
from gguf2st.errors import InputError

Json = dict[str, Any]
Merge = tuple[str, str]


@dataclass(frozen=True)
class Pipeline:
    """How text becomes ids and back, as JSON data.

    `tokens` maps each text to its id as it is spelled in the checkpoint, which
    may differ from the spelling in the GGUF. The steps may be None.
    """

    tokens: dict[str, int]
    model: Json
    normalizer: Json | None
    pre_tokenizer: Json | None
    decoder: Json | None


def sequence(kind: str, steps: list[Json]) -> Json | None:
    """One step for several: none, the step itself, or a Sequence of them.

    `kind` is the name of the list in the JSON: normalizers, pretokenizers,
    decoders or processors.
    """
    if len(steps) < 2:
        return steps[0] if steps else None
    return {"type": "Sequence", kind: steps}


def bpe_model(tokens: Mapping[str, int], merges: list[Merge], **options: Any) -> Json:
    """A BPE model; `options` replace the defaults of byte-level vocabularies."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": tokens,
        "merges": merges,
    } | options


def present_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Text to id, in the order of ids, for every token that has a text."""
    return {
        text: token
        for token, text in enumerate(vocabulary.tokens)
        if token not in vocabulary.absent
    }


def read_merges(
    metadata: Mapping[str, Any], tokens: Mapping[str, int], warnings: list[str]
) -> list[Merge]:
    """The merges of the file as pairs, best first.

    Both halves of a merge stand in one string with a space between. The first
    half may begin with a space itself, so the search starts after the first
    character, as in `llama_vocab::impl::load`. Merges that name no token are
    left out: they can't be applied, and tokenizers refuses a file with one.
    """
    listed = string_array(metadata, "tokenizer.ggml.merges")
    if not listed:
        raise InputError(
            "The vocabulary is of the byte pair kind but has no merges (tokenizer.ggml.merges is "
            f"missing or empty); {ANOTHER_TOKENIZER}."
        )
    merges: list[Merge] = []
    for merge in listed:
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space > 0 and left in tokens and right in tokens and left + right in tokens:
            merges.append((left, right))
    lost = len(listed) - len(merges)
    if lost:
        warnings.append(
            f"{lost:,} of {len(listed):,} merges name a token that the vocabulary lacks; "
            "they are left out"
        )
    return merges


def byte_level(
    metadata: Mapping[str, Any],
    vocabulary: Vocabulary,
    pre: PreTokenizer,
    warnings: list[str],
) -> Pipeline:
    """Byte pair encoding over GPT-2's byte alphabet (`llm_tokenizer_bpe`)."""
    tokens = present_tokens(vocabulary)
    merges = read_merges(metadata, tokens, warnings)
    return Pipeline(
        tokens=tokens,
        model=bpe_model(tokens, merges, ignore_merges=pre.ignore_merges),
        normalizer={"type": "NFC"} if pre.compose else None,
        pre_tokenizer=sequence("pretokenizers", [dict(step) for step in pre.steps]),
        decoder={
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
    )


def word_piece(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Pipeline:
    """BERT's longest-match vocabulary (`llm_tokenizer_wpm`).

    The GGUF marks beginnings of words with U+2581 and leaves continuations
    bare (`BertModel.set_vocab` in `conversion/bert.py`); a checkpoint leaves
    beginnings bare and marks continuations with ##.
    """
    tokens: dict[str, int] = {}
    for text, token in present_tokens(vocabulary).items():
        if vocabulary.types[token] == TokenType.CONTROL:
            spelled = text
        elif text.startswith("\u2581"):
            spelled = text[1:]
        else:
            spelled = "##" + text
        if tokens.setdefault(spelled, token) != token:
            raise InputError(
                f"The tokens {tokens[spelled]} and {token} would both be spelled {spelled!r:.60}; "
                f"the file is damaged, {ANOTHER_TOKENIZER}."
            )
    unknown = vocabulary.role("unk")
    if unknown is None:
        raise InputError(
            "The vocabulary has no token for unknown words (tokenizer.ggml.unknown_token_id); "
            f"{ANOTHER_TOKENIZER}."
        )
    lowercase = flag(metadata, "normalizer.lowercase", True)
    return Pipeline(
        tokens=tokens,
        model={
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": tokens,
        },
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": flag(metadata, "normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
