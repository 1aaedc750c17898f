"""Tokens that stand outside the text: how they are found in it, and which are added to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gguf2st.checkpoint.pipelines import Json, Pipeline
from gguf2st.checkpoint.pretokenizers import PreTokenizer
from gguf2st.checkpoint.vocabulary import TokenType, Vocabulary, flag


def added_tokens(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, pipeline: Pipeline
) -> list[Json]:
    """Tokens that are found in a text before anything else, by id.

    Control tokens are special (they can be left out of decoded text), tokens
    that a user defined aren't. Tokens with a role are among them whatever
    their type, because transformers adds them when it loads the files.
    """
    special = {*vocabulary.ids(TokenType.CONTROL, TokenType.UNKNOWN)}
    special.update(token for role, token in vocabulary.roles.items() if role not in ("eot", "eom"))
    if vocabulary.model == "t5":
        special.update(
            token for text, token in pipeline.tokens.items() if text.startswith("<extra_id_")
        )
    plain = set(vocabulary.ids(TokenType.USER_DEFINED))
    left, right = _strippers(metadata, vocabulary, special | plain)
    texts = {token: text for text, token in pipeline.tokens.items()}
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
        for token in sorted(special | plain)
        if token in texts
    ]


def _strippers(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, added: set[int]
) -> tuple[set[int], set[int]]:
    """Those of the added tokens that swallow white space to their left, and to their right.

    A GGUF doesn't say; the same guesses stand at the end of
    `llama_vocab::impl::load`.
    """
    name = str(metadata.get("general.name", "")).lower()
    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    architecture = metadata.get("general.architecture")
    if "phi-3" in name or "phi3" in name:
        keep = ("<unk>", "<s>", "<|endoftext|>")
        return set(), {token for token in added if vocabulary.tokens[token] not in keep}
    if pre.startswith("jina-v2-") or architecture in ("nomic-bert-moe", "jina-bert-v3"):
        mask = "<mask>"
    elif pre == "modern-bert" or "modern-bert" in name:
        mask = "[MASK]"
    else:
        return set(), set()
    return {token for token in added if vocabulary.tokens[token] == mask}, set()


def ends_to_add(
    metadata: Mapping[str, Any],
    vocabulary: Vocabulary,
    pre: PreTokenizer | None,
    warnings: list[str],
) -> tuple[str | None, str | None]:
    """Roles of the tokens that are put before and after a text, None for none.

    Where the file doesn't say, the defaults are those of
    `llama_vocab::impl::load`.
    """
    if vocabulary.model == "bert":
        return ("bos" if "bos" in vocabulary.roles else "cls"), "sep"
    by_default = {"llama": (True, False), "t5": (False, True)}
    before, after = by_default.get(vocabulary.model, (pre is not None and pre.add_bos, False))
    # In the layout of Gemma 4 llama.cpp puts bos first even if the file says no.
    if pre is None or pre.byte_level or not before:
        before = flag(metadata, "add_bos_token", before)
    after = flag(metadata, "add_eos_token", after)
    found: list[str | None] = []
    for wanted, role in ((before, "bos"), (after, "eos")):
        missing = vocabulary.role(role) is None
        if wanted and missing:
            warnings.append(
                f"the GGUF asks to add a {role} token (tokenizer.ggml.add_{role}_token) but names "
                "none, so none is added"
            )
        found.append(role if wanted and not missing else None)
    return found[0], found[1]


def post_processor(
    vocabulary: Vocabulary, pre: PreTokenizer | None, ends: tuple[str | None, str | None]
) -> Json | None:
    """The step that adds tokens to one text, or to a pair of texts."""
    before, after = ([(role, vocabulary.role(role))] if role else [] for role in ends)
    texts = {text: vocabulary.roles[role] for role, text in (*before, *after) if text is not None}
    if not texts:
        if pre is not None and pre.byte_level:
            # It does nothing to ids, but where there is none transformers makes its own.
            return {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            }
        return None
    first = [text for _, text in before]
    last = [text for _, text in after]
    # Between two texts BERT has one separator and RoBERTa two; a decoder starts anew.
    if vocabulary.model == "bert":
        second: list[str | None] = []
    elif vocabulary.model == "t5" or (pre is not None and pre.double_separator):
        second = last if first else []
    else:
        second = first
    single = [*_special(first, 0), _sequence("A", 0), *_special(last, 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *_special(second, 1), _sequence("B", 1), *_special(last, 1)],
        "special_tokens": {
            text: {"id": text, "ids": [token], "tokens": [text]} for text, token in texts.items()
        },
    }


def _special(texts: Iterable[str | None], segment: int) -> list[Json]:
    return [{"SpecialToken": {"id": text, "type_id": segment}} for text in texts]


def _sequence(name: str, segment: int) -> Json:
    return {"Sequence": {"id": name, "type_id": segment}}
