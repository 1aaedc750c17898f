"""The parts of a `tokenizer.json` for vocabularies that descend from SentencePiece.

SentencePiece works on plain text in which U+2581 stands for a space, and falls
back to one token per byte (<0x00> to <0xFF>) for characters it doesn't know.
Of its byte pair models a GGUF keeps the score of each token, not the merges:
llama.cpp merges whichever neighbours form the token with the best score
(`llm_tokenizer_spm` in `src/llama-vocab.cpp`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from gguf2st.checkpoint.pipelines import (
    Json,
    Merge,
    Pipeline,
    bpe_model,
    present_tokens,
    read_merges,
    sequence,
)
from gguf2st.checkpoint.vocabulary import ANOTHER_TOKENIZER, TokenType, Vocabulary, flag
from gguf2st.errors import InputError

SPACE = "\u2581"
# Longer pieces derive no merges: the work grows with the square of the length, and no tokenizer
# has learned such pieces.
_LONGEST_PIECE = 1024


def merged_by_score(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, warnings: list[str]
) -> Pipeline:
    """Byte pair encoding by score: Llama 1 and 2, Mistral, Phi-3, Gemma 1 to 3 and many others."""
    if vocabulary.scores is None:
        warnings.append(
            "the vocabulary has no scores (tokenizer.ggml.scores), so ids rank the merges"
        )
    tokens, runs = _spell_runs_of_spaces(present_tokens(vocabulary), vocabulary)
    mergeable = (TokenType.NORMAL, TokenType.UNUSED, TokenType.UNDEFINED)
    pieces = [text for text, token in tokens.items() if vocabulary.types[token] in mergeable]
    scores = (
        np.zeros(len(pieces))
        if vocabulary.scores is None
        else vocabulary.scores[[tokens[text] for text in pieces]]
    )
    merges: list[Merge] = [(SPACE * (length - 1), SPACE) for length in sorted(runs, reverse=True)]
    merges.extend(derive_merges(pieces, scores.tolist()))
    prefix = flag(metadata, "add_space_prefix", True)
    return Pipeline(
        tokens=tokens,
        model=_plain_text_model(vocabulary, tokens, merges),
        # Prepend rather than Metaspace: it acts on each stretch of text between special tokens.
        normalizer=sequence(
            "normalizers",
            [{"type": "Prepend", "prepend": SPACE}, _ESCAPE] if prefix else [_ESCAPE],
        ),
        pre_tokenizer=None,
        decoder=_decoder(prefix),
    )


def merged_by_rank(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, warnings: list[str]
) -> Pipeline:
    """Byte pair encoding of plain text by the merges of the file: Gemma 4, Sarvam."""
    tokens = present_tokens(vocabulary)
    merges = read_merges(metadata, tokens, warnings)
    return Pipeline(
        tokens=tokens,
        model=_plain_text_model(vocabulary, tokens, merges),
        normalizer=_ESCAPE,
        pre_tokenizer=None,
        decoder=_decoder(prefix=False),
    )


def unigram(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Pipeline:
    """The most probable pieces by score (`llm_tokenizer_ugm`): T5, XLM-RoBERTa."""
    unknown, scores = vocabulary.roles.get("unk"), vocabulary.scores
    if unknown is None or scores is None:
        missing = "unknown_token_id" if unknown is None else "scores"
        raise InputError(
            f"The vocabulary is of the unigram kind but has no tokenizer.ggml.{missing}; "
            f"{ANOTHER_TOKENIZER}."
        )
    texts = _name_sentinels(metadata, vocabulary)
    for token in vocabulary.absent:
        if not texts[token].isprintable() or not texts[token]:
            texts[token] = f"[NONE{token}]"  # empty or not UTF-8
    # The place in the list is the id: slots in the middle have to stay, at the end they can go.
    while texts and len(texts) - 1 in vocabulary.absent and texts[-1].startswith("[PAD"):
        texts.pop()
    merge_spaces = flag(metadata, "remove_extra_whitespaces", False)
    prefix = flag(metadata, "add_space_prefix", False)
    steps: list[Json] = []
    if merge_spaces:
        steps.append(
            {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "Removed",
                "invert": False,
            }
        )
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if prefix or merge_spaces else "never",
        "split": True,
    }
    return Pipeline(
        tokens={text: token for token, text in enumerate(texts)},
        model={
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[text, float(scores[token])] for token, text in enumerate(texts)],
            "byte_fallback": False,
        },
        normalizer=_character_map(metadata),
        pre_tokenizer=sequence("pretokenizers", [*steps, metaspace]),
        decoder=metaspace,
    )


def derive_merges(pieces: Sequence[str], scores: Sequence[float]) -> list[Merge]:
    """Merges, best first, that lead to what merging by score leads to.

    `pieces` are in the order of their ids. Every way to cut a piece into two
    others gives a merge, ranked by the score of the piece. llama.cpp takes the
    leftmost of several candidates with the same score; a longer left half
    comes first here, which is the same wherever a run grows from the left.
    Where all scores are equal they mean nothing (converters write the same
    number when they have none), and the order of ids ranks.

    The result is that of `generate_merges` of transformers.
    """
    known = frozenset(pieces)
    ranked = sorted(range(len(pieces)), key=lambda place: -scores[place])
    meaningful = len(ranked) > 0 and scores[ranked[0]] != scores[ranked[-1]]
    merges: list[Merge] = []
    for _, group in groupby(ranked, key=scores.__getitem__):
        start, places = len(merges), list(group)
        for place in places:
            piece = pieces[place]
            if len(piece) > _LONGEST_PIECE:
                continue
            for cut in range(len(piece) - 1, 0, -1):
                right = piece[cut:]
                if right in known:
                    left = piece[:cut]
                    if left in known:
                        merges.append((left, right))
        if len(places) > 1 and meaningful:
            merges[start:] = sorted(merges[start:], key=_longest_left_first)
    return merges


def _longest_left_first(merge: Merge) -> tuple[int, int]:
    return -len(merge[0]), -len(merge[1])


_ESCAPE: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def _decoder(prefix: bool) -> Json | None:
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return sequence("decoders", steps)


def _plain_text_model(
    vocabulary: Vocabulary, tokens: Mapping[str, int], merges: list[Merge]
) -> Json:
    unknown = vocabulary.role("unk")
    return bpe_model(
        tokens,
        merges,
        unk_token=unknown if unknown in tokens else None,
        fuse_unk=True,
        byte_fallback=True,
    )


def _spell_runs_of_spaces(
    tokens: dict[str, int], vocabulary: Vocabulary
) -> tuple[dict[str, int], list[int]]:
    """Undo what the converter did to added tokens of several spaces, as Gemma has them.

    Returns the tokens and the lengths of the runs. Spelled with U+2581 such a
    token isn't found as an added token, because the space in a text becomes
    U+2581 only later; merges have to lead to it. Growing from the left they
    find the longest run first, as SentencePiece and llama.cpp do.
    """
    runs: dict[int, str] = {
        len(text): text
        for token in vocabulary.ids(TokenType.USER_DEFINED)
        if len(text := vocabulary.tokens[token]) > 1 and not text.strip(" ")
    }
    # Growth needs every length from 2 up, and a single space to begin with.
    if (
        not runs
        or SPACE not in tokens
        or any(length not in runs or SPACE * length in tokens for length in range(2, len(runs) + 2))
    ):
        return tokens, []
    spelled = {text: SPACE * length for length, text in runs.items()}
    return {spelled.get(text, text): token for text, token in tokens.items()}, list(runs)


def _name_sentinels(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[str]:
    """T5's <extra_id_0> to <extra_id_99>, which the converter stores as padding slots.

    They follow the pieces, the highest number first.
    """
    texts = list(vocabulary.tokens)
    if str(metadata.get("general.architecture", "")).startswith("t5"):
        slots = [
            token
            for token in sorted(vocabulary.absent)
            if re.fullmatch(r"\[PAD\d+\]", texts[token])
        ]
        for number, token in zip(range(99, -1, -1), slots, strict=False):
            texts[token] = f"<extra_id_{number}>"
    return texts


def _character_map(metadata: Mapping[str, Any]) -> Json | None:
    key = "tokenizer.ggml.precompiled_charsmap"
    value = metadata.get(key)
    if value is None:
        return None
    content = value.tobytes() if isinstance(value, np.ndarray) and value.itemsize == 1 else b""
    # A table of the stated size, then the texts that it points into: the same check as llama.cpp's.
    if len(content) < 4 or int.from_bytes(content[:4], "little") + 4 >= len(content):
        raise InputError(
            f"The key {key} doesn't hold a character map of SentencePiece; the file is damaged, "
            f"{ANOTHER_TOKENIZER}."
        )
    encoded = base64.b64encode(content).decode("ascii")
    return {"type": "Precompiled", "precompiled_charsmap": encoded}
