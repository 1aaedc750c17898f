"""`generation_config.json`: where generation ends, and how tokens are sampled.

A GGUF names one end-of-sequence token; a chat model often ends its turns with
another one. llama.cpp finds those by their texts (the list of end-of-generation
tokens in `llama_vocab::impl::load`, `src/llama-vocab.cpp`). That list also has
tokens that end a message or fill a gap in code and not a turn; they are left
out here, because an engine that stops at them cuts answers short.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gguf2st.checkpoint.vocabulary import TURN_ENDS, TokenType, read_roles, string_array

# Texts that end a turn in some vocabularies and mark up a text in others, like the end of
# struck-out text in HTML; they count only where the file marks them as control.
_TURN_ENDS_IF_CONTROL = frozenset(("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"))

# Key of a GGUF -> field, and the values that engines accept.
_SAMPLING = (
    ("temp", "temperature", 0.0, math.inf),
    ("top_k", "top_k", 0, math.inf),
    ("top_p", "top_p", 1e-6, 1.0),
    ("min_p", "min_p", 0.0, 1.0),
    ("penalty_repeat", "repetition_penalty", 1e-6, math.inf),
)


def generation_config(
    metadata: Mapping[str, Any], *, warnings: list[str] | None = None
) -> dict[str, Any]:
    """The fields of `generation_config.json` that a GGUF knows.

    `eos_token_id` is a number, or a list where several tokens end a turn.
    Sampling values that no engine would accept are left out and noted in
    `warnings`. Raises `InputError` for token ids beyond the vocabulary.
    """
    notes: list[str] = [] if warnings is None else warnings
    config: dict[str, Any] = {}
    roles = read_roles(metadata)
    ends = end_of_turn_ids(metadata)
    if "bos" in roles:
        config["bos_token_id"] = roles["bos"]
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if "pad" in roles:
        config["pad_token_id"] = roles["pad"]
    sampling = _sampling(metadata, notes)
    if sampling.get("temperature") == 0:
        # Zero stands for the most probable token, which has a field of its own.
        return config | {"do_sample": False}
    if sampling:
        config |= {"do_sample": True} | sampling
    return config


def end_of_turn_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens at which generation has to stop.

    The end-of-sequence token comes first, then the end-of-turn token that the
    file names, then those that are known by their text, by id.
    """
    roles = read_roles(metadata)
    tokens = string_array(metadata, "tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type")
    named = [roles[role] for role in ("eos", "eot") if role in roles]
    known = {
        text: token
        for token, text in enumerate(tokens)
        if text in TURN_ENDS
        or (
            text in _TURN_ENDS_IF_CONTROL
            and kinds is not None
            and token < len(kinds)
            and kinds[token] == TokenType.CONTROL
        )
    }
    # Where these exist, <|end|> ends a message of several in a turn.
    if {"<|return|>", "<|call|>"} <= known.keys() or {"<|calls|>", "<|flush|>"} <= known.keys():
        known.pop("<|end|>", None)
    message_end = roles.get("eom")
    others = sorted(token for token in known.values() if token != message_end)
    return list(dict.fromkeys([*named, *others]))


def _sampling(metadata: Mapping[str, Any], notes: list[str]) -> dict[str, float | int]:
    fields: dict[str, float | int] = {}
    for name, field, lowest, highest in _SAMPLING:
        key = f"general.sampling.{name}"
        value = metadata.get(key)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not lowest <= value <= highest
        ):
            notes.append(f"the key {key} is {value!r:.40}, which can't be used, so it is left out")
        else:
            # Stored as float32: its shortest decimal is what the original said.
            fields[field] = value if isinstance(value, int) else float(str(np.float32(value)))
    return fields
