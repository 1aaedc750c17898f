"""How text is cut, for every name in `tokenizer.ggml.pre`: against llama.cpp's source and runtime.

The runtime is asked about a vocabulary in which anything merges with what stands to its right, so
that wherever text is cut, ids differ from those of text cut elsewhere.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import gguf
import pytest

from gguf2st.checkpoint.pretokenizers import PRE_TOKENIZERS
from gguf2st.checkpoint.tokenizer import build_tokenizer
from gguf2st.gguf.container import GgufFile
from tests.checkpoint.small import byte_alphabet
from tests.checkpoint.vocabularies import load, runtime, texts
from tests.oracles.llama_cpp_source import llama_cpp_source

LONGEST = 5  # bytes of a token
FAMILIES = {row.family: name for name, row in PRE_TOKENIZERS.items() if row.byte_level}


def categories(text: str) -> str:
    """One letter for each character: L M N P S Z C, the first of its Unicode category."""
    return "".join(unicodedata.category(character)[0] for character in text)


def has_other_case(text: str) -> bool:
    """Letters with case outside ASCII, or combining marks."""
    return any(
        unicodedata.category(character) in ("Lu", "Ll", "Lt", "Mn", "Mc", "Me")
        for character in text
        if not character.isascii()
    )


def changes_case(text: str) -> bool:
    return has_other_case(text) or re.search("[a-z][A-Z]", text) is not None


def has_other_space(text: str) -> bool:
    return re.search(r"[^\S\x00-\x7f]", text) is not None


def has_spaces_before_number(text: str) -> bool:
    return (
        re.search(
            "  N",
            re.sub(
                r"\s",
                " ",
                "".join(
                    "N" if kind == "N" else character
                    for character, kind in zip(text, categories(text), strict=True)
                ),
            ),
        )
        is not None
    )


def has_number_in_word(text: str) -> bool:
    return re.search(r"\d\w*[^\W\d]", text) is not None or re.search(r"\d{4}", text) is not None


# Texts on which llama.cpp is known not to do what the original expression says.
UNLIKE_THE_ORIGINAL: dict[str, tuple[Callable[[str], bool], ...]] = {
    # Its rewritten expressions know the case of ASCII letters only, and no marks.
    "gpt4o": (has_other_case,),
    "tekken": (has_other_case,),
    # Here it doesn't tell case at all.
    "kimi_k2": (changes_case,),
    "youtu": (changes_case,),
    # Its \s is that of C++, and it maps other white space to U+000B beforehand.
    "deepseek_llm": (has_other_space,),
    "deepseek_coder": (has_other_space,),
    # Its own code for groups of three digits doesn't cut before the first one.
    "afmoe": (has_spaces_before_number,),
    "tiny_aya": (changes_case, has_spaces_before_number, has_number_in_word),
}


@cache
def sentences() -> list[str]:
    return [text for text in texts(160, ("<|x|>", "IMGIMGABZ")) if 0 < len(text) < 120]


def merging_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: all short pieces of the sentences, and longer ones merge first."""
    alphabet = byte_alphabet()
    pieces: dict[str, None] = {}
    for text in sentences():
        spelled = "".join(alphabet[byte] for byte in text.encode())
        for start in range(len(spelled)):
            for size in range(2, LONGEST + 1):
                if start + size <= len(spelled):
                    pieces[spelled[start : start + size]] = None
    ranked = sorted(pieces, key=lambda piece: -len(piece))
    return [*alphabet.values(), *pieces], [f"{piece[:-1]} {piece[-1]}" for piece in ranked]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pre") / "template.gguf"
    tokens, merges = merging_vocabulary()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("PRE")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_text_is_cut_where_llama_cpp_cuts_it(family: str, template: Path, tmp_path: Path) -> None:
    name = FAMILIES[family]
    file = tmp_path / "vocabulary.gguf"
    value = len(name).to_bytes(8, "little") + name.encode()
    file.write_bytes(template.read_bytes().replace((3).to_bytes(8, "little") + b"PRE", value, 1))
    content = build_tokenizer(GgufFile(file).metadata, vocab_size=None, max_length=None)
    written = load(content.tokenizer_json | {"normalizer": None})
    excluded = UNLIKE_THE_ORIGINAL.get(family, ())
    chosen = [text for text in sentences() if not any(unlike(text) for unlike in excluded)]
    with runtime(file) as original:
        wrong = [
            (text, expected, found)
            for text in chosen
            if (found := written.encode(text, add_special_tokens=False).ids)
            != (expected := original.tokenize(text, False))
        ]
    assert not wrong
    assert len(chosen) > 40


def source_expressions() -> Iterator[tuple[str, list[str], list[str]]]:
    """Name of each kind in llama.cpp, the expressions it uses, and the originals it cites."""
    source = (llama_cpp_source() / "src/llama-vocab.cpp").read_text(encoding="utf-8")
    begin = source.index("switch (vocab.get_pre_type())")
    body = source[begin : source.index("std::vector<std::string> regex_exprs;", begin)]
    for block in body.split("break;"):
        kinds = re.findall(r"case LLAMA_VOCAB_PRE_TYPE_(\w+):", block)
        used: list[str] = []
        cited: list[str] = []
        for line in block.splitlines():
            if found := re.search(r'^\s*(//[^"]*)?"((?:[^"\\]|\\.)*)"', line):
                (cited if found[1] else used).append(unescape(found[2]))
        for kind in kinds or ["DEFAULT"] * ("default:" in block):
            yield kind, used, cited


def unescape(literal: str) -> str:
    """The characters of a C++ string literal; line ends stay escapes, as expressions have them."""
    return re.sub(r"\\(.)", lambda found: {"n": r"\n", "r": r"\r"}.get(found[1], found[1]), literal)


def names_by_kind() -> Iterator[tuple[str, str]]:
    source = (llama_cpp_source() / "src/llama-vocab.cpp").read_text(encoding="utf-8")
    begin = source.index("if (tokenizer_pre.empty())")
    body = source[begin : source.index("unknown pre-tokenizer type", begin)]
    for block in body.split("else if (")[1:]:
        kind = re.search(r"pre_type = LLAMA_VOCAB_PRE_TYPE_(\w+);", block)[1]
        for name in re.findall(r'tokenizer_pre == "([^"]+)"', block):
            yield name, kind


ADAPTED = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
ORIGINAL = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def canonical(expression: str) -> str:
    """Without differences that change nothing.

    Text that no alternative matches is a piece of its own anyway, so the last one may be missing.
    """
    expression = expression.replace(ADAPTED, ORIGINAL)
    end = r"\s+(?!\S)"
    return expression.removesuffix(r"|\s+") if expression.endswith(end + r"|\s+") else expression


def written_expressions(name: str) -> Iterator[str]:
    for step in PRE_TOKENIZERS[name].steps:
        if step["type"] == "Split":
            yield canonical(step["pattern"]["Regex"])
        elif step["type"] == "Digits":
            yield r"\p{N}"
        elif step["use_regex"]:
            yield GPT2


def test_expressions_are_those_of_llama_cpps_source() -> None:
    """Character by character: where an original is cited, it, else what llama.cpp uses."""
    by_kind = {kind: (used, cited) for kind, used, cited in source_expressions()}
    compared = 0
    for name, kind in names_by_kind():
        if kind in ("KIMI_K2", "GEMMA4", "SARVAM_MOE", "WHITESPACE", "GRANITE_EMB_MULTI"):
            continue  # code instead of expressions, nothing to cut, or rewritten without citation
        used, cited = by_kind[kind]
        expected = [canonical(line) for line in [*used[: len(used) - len(cited)], *cited]]
        written = list(written_expressions(name))
        if kind == "AFMOE":
            del written[0], expected[0]  # groups of digits are code there
        assert written == expected, name
        compared += 1
    assert compared > 80


def test_every_name_that_llama_cpp_knows_is_there() -> None:
    known = {name for name, _ in names_by_kind()}
    assert known - set(PRE_TOKENIZERS) == {"whitespace"}
    assert set(PRE_TOKENIZERS) - known == set()


def test_flags_are_those_of_llama_cpp() -> None:
    source = (llama_cpp_source() / "src/llama-vocab.cpp").read_text(encoding="utf-8")
    begin = source.index("if (tokenizer_pre.empty())")
    body = source[begin : source.index("unknown pre-tokenizer type", begin)]
    for block in body.split("else if (")[1:]:
        for name in re.findall(r'tokenizer_pre == "([^"]+)"', block):
            if name == "whitespace":
                continue
            row = PRE_TOKENIZERS[name]
            assert row.ignore_merges == ("ignore_merges = true" in block), name
            assert row.double_separator == ("add_sep = true" in block), name
            if row.byte_level:
                assert row.add_bos == ("add_bos = true" in block), name
