"""Taking over files of the original checkpoint, and saying where they differ from the GGUF."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf2st.errors import InputError, UsageError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Fields that fix the tensors' shapes: where they differ, the directory is of another model.
SHAPE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "linear_num_value_heads",
    "linear_num_key_heads",
)
# Fields that follow the tensors which are written, whatever the original had.
OWN_FIELDS = (
    "architectures",
    "model_type",
    "dtype",
    "vocab_size",
    "tie_word_embeddings",
    "mtp_num_hidden_layers",
    "full_attention_interval",
    "deepstack_visual_indexes",
)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def original_directory(place: str | os.PathLike[str], wanted: tuple[str, ...]) -> Path:
    """A directory of the user's, or the wanted files of a hub repository that the user named.

    Raises `UsageError` when it is neither, or when the hub package isn't installed.
    """
    path = Path(place)
    if path.is_dir():
        return path
    if not HUB_NAME.fullmatch(str(place)):
        raise UsageError(
            f"{place} is neither a directory nor the name of a hub repository (owner/name)."
        )
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  # optional package
    except ImportError as error:
        raise UsageError(
            f"{place} names a hub repository, and fetching needs an optional package; "
            "run: pip install 'gguf2st[hub]'"
        ) from error
    try:
        return Path(snapshot_download(str(place), allow_patterns=list(wanted)))
    except Exception as error:  # the hub client raises many kinds
        raise InputError(
            f"{place} can't be fetched ({error}); give a directory instead."
        ) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} can't be read ({error}); give the original's directory."
        ) from error


def _parse_json(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{path} can't be read ({error}); give the original's directory."
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"{path} isn't a JSON object; give the original's directory.")
    return content


def merge_config(derived: dict[str, Any], directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The original's config.json, with what the written tensors decide taken from `derived`.

    Returns it with one line for each field on which the two disagree. Raises
    `UsageError` when the original is of a model with other shapes.
    """
    path = directory / "config.json"
    original = _parse_json(_read_text(path), path)
    original.pop("quantization_config", None)
    if "text_config" in original and "text_config" not in derived:
        original = original["text_config"]
    elif "text_config" in derived and "text_config" not in original:
        original = {"text_config": original}
    return _merge(derived, original, str(path), "")


def _merge(
    derived: dict[str, Any], original: dict[str, Any], where: str, prefix: str
) -> tuple[dict[str, Any], list[str]]:
    merged, differences = dict(derived), []
    for key, value in original.items():
        mine = derived.get(key)
        name = prefix + key
        if isinstance(value, dict) and isinstance(mine, dict) and key.endswith("_config"):
            merged[key], below = _merge(mine, value, where, f"{name}.")
            differences += below
            continue
        if key in derived and mine != value:
            if key in SHAPE_FIELDS:
                raise UsageError(
                    f"{where} says {name} = {value} but the GGUF has {mine}; it is of another model."
                )
            kept = "GGUF's" if key in OWN_FIELDS else "original's"
            differences.append(f"{name}: GGUF {mine!r}, original {value!r}; the {kept} is written")
        if key not in OWN_FIELDS:
            merged[key] = value
    return merged, differences


def read_tokenizer_files(
    directory: Path, metadata: Mapping[str, Any], vocab_size: int
) -> tuple[dict[str, str], list[str]]:
    """The original's tokenizer files, with one line for each way they differ from the GGUF.

    Raises `UsageError` without a tokenizer.json, or when its ids exceed `vocab_size`.
    """
    texts = {
        name: _read_text(directory / name)
        for name in TOKENIZER_FILES
        if (directory / name).is_file()
    }
    if "tokenizer.json" not in texts:
        raise UsageError(f"{directory} has no tokenizer.json; give the original's directory.")
    return texts, list(_vocabulary_differences(directory, texts, metadata, vocab_size))


def _vocabulary_differences(
    directory: Path, texts: dict[str, str], metadata: Mapping[str, Any], vocab_size: int
) -> Iterator[str]:
    tokenizer = _parse_json(texts["tokenizer.json"], directory / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):
        vocabulary = {item[0]: number for number, item in enumerate(vocabulary)}
    original = {int(number): text for text, number in vocabulary.items()}
    original |= {int(token["id"]): token["content"] for token in tokenizer.get("added_tokens", ())}
    if original and max(original) >= vocab_size:
        raise UsageError(
            f"{directory / 'tokenizer.json'} has token ids up to {max(original)} but the embedding has "
            f"{vocab_size} rows; it is of another model."
        )
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    other = [n for n, text in original.items() if n < len(tokens) and tokens[n] != text]
    if other:
        first = min(other)
        yield (
            f"{len(other)} tokens have other texts (first: {first} is {tokens[first]!r} in the GGUF and "
            f"{original[first]!r} in the original); the original's are written"
        )
    template = texts.get("chat_template.jinja")
    if template is None and "tokenizer_config.json" in texts:
        path = directory / "tokenizer_config.json"
        template = _parse_json(texts["tokenizer_config.json"], path).get("chat_template")
    if template is not None and template != metadata.get("tokenizer.chat_template"):
        yield "the chat template differs; the original's is written"
