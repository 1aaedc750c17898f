"""The vocabulary of a GGUF, read from its keys and checked.

llama.cpp reads the same keys in `llama_vocab::impl::load` (`src/llama-vocab.cpp`);
its converter writes them in `get_vocab_base` and `_create_vocab_sentencepiece`
(`conversion/base.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.errors import InputError, UnsupportedError

ANOTHER_TOKENIZER = "give the original model's tokenizer with --tokenizer-from DIR"

_BUILDABLE = ("gpt2", "llama", "gemma4", "bert", "t5")

# The role of a token in a checkpoint, and the end of the key that names it in a GGUF.
_ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # spelled so in the format
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
# How a file says "no such token" where only unsigned numbers can be stored.
_NO_TOKEN = (1 << 32) - 1

TURN_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
    )
)
"""Texts that end a turn of a chat in whatever vocabulary they occur."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PADDING = re.compile(r"\[PAD(\d+)\]")


class TokenType(IntEnum):
    """What a token is, by the numbers of `enum llama_token_type` in llama.cpp's `llama.h`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """A checked vocabulary.

    `tokens` and `types` are indexed by id, as is `scores` (float64) where the
    file has them. `absent` are ids without a text: padding slots, empty
    tokens and tokens that aren't UTF-8. `roles` maps bos, eos, eot, eom, unk,
    sep, pad, cls and mask to ids, as far as they exist.
    """

    model: str
    tokens: list[str]
    types: list[int]
    scores: npt.NDArray[np.float64] | None
    absent: frozenset[int]
    roles: dict[str, int]

    def ids(self, *types: TokenType) -> list[int]:
        """Ids of the present tokens of these types, ascending."""
        return [
            token
            for token, kind in enumerate(self.types)
            if kind in types and token not in self.absent
        ]

    def role(self, name: str) -> str | None:
        """Text of the token with this role, None where there is none."""
        token = self.roles.get(name)
        return None if token is None or token in self.absent else self.tokens[token]


def read_vocabulary(metadata: Mapping[str, Any], warnings: list[str]) -> Vocabulary:
    """The vocabulary that the keys `tokenizer.ggml.*` describe.

    What is odd but harmless is noted in `warnings`. Raises `InputError` where
    the keys contradict each other, and `UnsupportedError` for a kind of
    vocabulary that no `tokenizer.json` can hold or that isn't implemented.
    """
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise InputError(
            "The file holds no tokenizer (the key tokenizer.ggml.model is missing); "
            f"{ANOTHER_TOKENIZER}."
        )
    if model not in _BUILDABLE:
        raise UnsupportedError(
            f"A tokenizer of the kind {model!r} (tokenizer.ggml.model) can't be written as "
            f"tokenizer.json; {ANOTHER_TOKENIZER}."
        )
    tokens = string_array(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise InputError(
            f"The vocabulary is empty or missing (tokenizer.ggml.tokens); {ANOTHER_TOKENIZER}."
        )
    listed = _types(metadata, len(tokens))
    roles = _roles(metadata, listed, len(tokens))
    types = listed or _guess_types(tokens, roles)
    absent = _absent(tokens, types, warnings)
    _check_unique(tokens, absent)
    for token, text in enumerate(tokens):
        if types[token] == TokenType.NORMAL and text in TURN_ENDS:
            types[token] = TokenType.CONTROL
            warnings.append(f"token {token} {text!r} is marked as text; it is taken as control")
    return Vocabulary(model, tokens, types, _scores(metadata, len(tokens)), absent, roles)


def read_roles(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the tokens with a role (bos, eos, eot, eom, unk, sep, pad, cls, mask).

    For a vocabulary of any kind. Raises `InputError` for an id beyond the vocabulary.
    """
    count = len(string_array(metadata, "tokenizer.ggml.tokens") or ())
    return _roles(metadata, _types(metadata, count) if count else None, count)


def string_array(metadata: Mapping[str, Any], key: str) -> list[str] | None:
    """The array of strings at `key`, None if the key is missing; `InputError` for another type."""
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, list):
        raise InputError(f"The key {key} must hold an array of strings; {ANOTHER_TOKENIZER}.")
    return value


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """The boolean `tokenizer.ggml.NAME`, or `default` where the file doesn't say."""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool | int):
        raise InputError(
            f"The key tokenizer.ggml.{name} must be true or false, not {value!r:.60}; "
            f"{ANOTHER_TOKENIZER}."
        )
    return bool(value)


def _numbers(metadata: Mapping[str, Any], key: str, count: int) -> npt.NDArray[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise InputError(f"The key {key} must hold an array of numbers; {ANOTHER_TOKENIZER}.")
    if len(value) != count:
        raise InputError(
            f"The vocabulary has {count:,} tokens but {key} has {len(value):,} items; "
            f"the file is damaged, {ANOTHER_TOKENIZER}."
        )
    return value


def _types(metadata: Mapping[str, Any], count: int) -> list[int] | None:
    array = _numbers(metadata, "tokenizer.ggml.token_type", count)
    if array is None:
        return None
    known = np.isin(array, [int(kind) for kind in TokenType])
    if not known.all():
        first = int(np.argmin(known))
        raise InputError(
            f"Token {first} has the type {array[first]} (tokenizer.ggml.token_type), and types are "
            f"0 to 6; the file is damaged, {ANOTHER_TOKENIZER}."
        )
    types: list[int] = array.astype(np.int64).tolist()
    return types


def _scores(metadata: Mapping[str, Any], count: int) -> npt.NDArray[np.float64] | None:
    array = _numbers(metadata, "tokenizer.ggml.scores", count)
    if array is None:
        return None
    finite = np.isfinite(array)
    if not finite.all():
        first = int(np.argmin(finite))
        raise InputError(
            f"Token {first} has the score {array[first]} (tokenizer.ggml.scores), which can't be "
            f"ordered; the file is damaged, {ANOTHER_TOKENIZER}."
        )
    return array.astype(np.float64)


def _roles(metadata: Mapping[str, Any], types: list[int] | None, count: int) -> dict[str, int]:
    defaults = _DEFAULT_IDS.get(str(metadata.get("tokenizer.ggml.model")), {})
    limit = count or _NO_TOKEN  # a file without a vocabulary may still name ids
    roles: dict[str, int] = {}
    for role, suffix in _ROLE_KEYS.items():
        key = f"tokenizer.ggml.{suffix}"
        token = metadata.get(key)
        if token in (-1, _NO_TOKEN):
            continue
        if token is None:
            token = defaults.get(role)
            # The defaults are ids of the first model of each kind. They hold for another model
            # only where that token is no text.
            if (
                token is None
                or token >= count
                or types is None
                or types[token] not in (TokenType.CONTROL, TokenType.UNKNOWN)
            ):
                continue
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limit:
            raise InputError(
                f"The key {key} is {token!r:.60}, which is no id of the {count:,} tokens; "
                f"the file is damaged, {ANOTHER_TOKENIZER}."
            )
        roles[role] = token
    return roles


def _guess_types(tokens: list[str], roles: Mapping[str, int]) -> list[int]:
    """Types for a file from before token types: bytes by their spelling, the rest by their role."""
    types = [
        int(
            TokenType.BYTE if text.startswith("<0x") and _BYTE.fullmatch(text) else TokenType.NORMAL
        )
        for text in tokens
    ]
    for role, token in roles.items():
        types[token] = int(TokenType.UNKNOWN if role == "unk" else TokenType.CONTROL)
    return types


def _absent(tokens: list[str], types: list[int], warnings: list[str]) -> frozenset[int]:
    absent: set[int] = set()
    for token, text in enumerate(tokens):
        if not text:
            absent.add(token)
        elif text.startswith("[PAD") and (match := _PADDING.fullmatch(text)):
            kind = types[token]
            # The slots that pad the embedding are marked as unused; older converters marked them
            # as user-defined or unknown.
            if kind == TokenType.UNUSED or (
                kind not in (TokenType.NORMAL, TokenType.CONTROL) and match[1] == str(token)
            ):
                absent.add(token)
    broken = _not_utf8(tokens)
    if broken:
        warnings.append(
            f"{len(broken)} tokens aren't valid UTF-8 (the first has the id {broken[0]}); "
            "they are left out of tokenizer.json, as no text leads to them"
        )
    return frozenset(absent.union(broken))


def _not_utf8(tokens: list[str]) -> list[int]:
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        return [token for token, text in enumerate(tokens) if re.search("[\ud800-\udfff]", text)]
    return []


def _check_unique(tokens: list[str], absent: frozenset[int]) -> None:
    if len(set(tokens)) == len(tokens):
        return
    first: dict[str, int] = {}
    for token, text in enumerate(tokens):
        if token not in absent and first.setdefault(text, token) != token:
            raise InputError(
                f"The tokens {first[text]} and {token} are both {text!r:.60} "
                f"(tokenizer.ggml.tokens); the file is damaged, {ANOTHER_TOKENIZER}."
            )
