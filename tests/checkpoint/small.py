"""Vocabularies of a few hundred tokens, as the metadata of a GGUF holds them."""

from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of each byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }


def _with_arrays(tokens: list[tuple[str, int]], **keys: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": np.array([kind for _, kind in tokens], np.int32),
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def byte_pair(*more: tuple[str, int], **keys: Any) -> dict[str, Any]:
    """Byte-level BPE: 256 bytes, "he", "ll", "hell", "hello", then `more`; ids from 260 on."""
    tokens = [(text, NORMAL) for text in (*byte_alphabet().values(), "he", "ll", "hell", "hello")]
    merges = ["h e", "l l", "he ll", "hell o"]
    defaults = {"model": "gpt2", "pre": "gpt-2", "merges": merges}
    return _with_arrays([*tokens, *more], **(defaults | keys))


def scored(*more: tuple[str, int, float], **keys: Any) -> dict[str, Any]:
    """SentencePiece BPE: unk, bos, eos, 256 bytes, letters, some words, then `more`."""
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    words = ["he", "ll", "hell", "hello", SPACE + "hello", SPACE + "h"]
    tokens += [(word, NORMAL, -1.0 - place) for place, word in enumerate(words)]
    tokens += [(letter, NORMAL, -100.0) for letter in SPACE + "helo"]
    tokens += more
    metadata = _with_arrays([(text, kind) for text, kind, _ in tokens], model="llama")
    metadata["tokenizer.ggml.scores"] = np.array([score for *_, score in tokens], np.float32)
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
