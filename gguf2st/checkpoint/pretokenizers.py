"""How text is cut into words before byte pair encoding, by the name a GGUF gives it.

llama.cpp replaces a tokenizer's pre-tokenizer by a name (`tokenizer.ggml.pre`)
that stands for a list of regular expressions, applied one after the other;
the names are resolved in `llama_vocab::impl::load` and the expressions listed
in `llm_tokenizer_bpe`, both in llama.cpp's `src/llama-vocab.cpp`. Here each
name leads back to the steps that a `tokenizer.json` holds. Where llama.cpp
adapted an expression to what its own engine can do and cites the original, the
original is used.

Characters outside ASCII are written as escapes, because editors and version
control like to normalise them, which turns ranges into other ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Step = dict[str, Any]

# Pieces that many families share.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# A word in which capitals come before small letters, as in o200k and tekken.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_word(upper: str, lower: str, suffix: str = "") -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


def _split(expression: str) -> Step:
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(use_regex: bool) -> Step:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


# ByteLevel's own expression is GPT-2's.
_GPT2 = _byte_level(use_regex=True)
_BYTES = _byte_level(use_regex=False)
_EACH_DIGIT: Step = {"type": "Digits", "individual_digits": True}


def _splits(*expressions: str) -> tuple[Step, ...]:
    return (*map(_split, expressions), _BYTES)


# Cased letters (Lu, Ll, Lt) of the Unicode version that deepseek-llm was trained with.
_CASED_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = _any(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
)
_O200K_TAIL = _any(r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACE)
_O200K = _any(_cased_word(_UPPER, _LOWER, f"{_CONTRACTION}?"), r"\p{N}{1,3}", _O200K_TAIL)
_QWEN2 = _any(_CONTRACTION, _WORD, r"\p{N}", _PUNCTUATION, _SPACE)
# Words of scripts without spaces; the list is that of Arcee's Trinity tokenizer.
_UNSPACED_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_MARKS = (
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
)
_BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" + ")]+"
_NOT_HAN = r"&&[^\p{Han}]]"

_FAMILIES: dict[str, tuple[Step, ...]] = {
    "gpt2": (_GPT2,),
    "digits": (_EACH_DIGIT, _GPT2),
    "llama3": _splits(_any(_CONTRACTION, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _SPACE)),
    "qwen2": _splits(_QWEN2),
    "qwen35": _splits(
        _any(
            _CONTRACTION,
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            _SPACE,
        )
    ),
    "gpt4o": _splits(_O200K),
    "tiny_aya": _splits(r"\d{1,3}(?=(?:\d{3})*\b)", _O200K),
    "tekken": _splits(_any(_cased_word(_UPPER, _LOWER), r"\p{N}", _O200K_TAIL)),
    "kimi_k2": _splits(
        _any(
            r"[\p{Han}]+",
            _cased_word(
                _UPPER[:-1] + _NOT_HAN,
                _LOWER[:-1] + _NOT_HAN,
                f"{_CONTRACTION}?",
            ),
            r"\p{N}{1,3}",
            _PUNCTUATION,
            _SPACE,
        )
    ),
    "youtu": _splits(
        _any("[\uac00-\ud7a3\u3131-\u318e]+", _YOUTU_MARKS, "[\u3105-\u312f]+", _CJK),
        _any(_cased_word(_UPPER, _LOWER, f"{_CONTRACTION}?"), r"\p{N}", _O200K_TAIL),
    ),
    "jais2": _splits(
        _any(
            _CONTRACTION,
            _WORD,
            r"\p{N}{1,3}",
            _PUNCTUATION,
            r"\s*[\r\n]+",
            *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)),
            r"\s{1,2}(?!\S)",
            r"\s{1}",
        )
    ),
    "deepseek3": _splits(r"\p{N}{1,3}", _CJK, _any(_DEEPSEEK3, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACE)),
    "spark25": _splits(
        r"\p{N}{1,3}",
        _CJK,
        _any(_DEEPSEEK3, r" ?[\p{P}\p{S}]+", r"[\r\n]", r"\s+(?!\S)", r"\s+"),
        r"\p{N}",
    ),
    "afmoe": _splits(
        # Groups of three counted from the right, so that the first group takes the remainder.
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        _UNSPACED_SCRIPTS,
        _any(_DEEPSEEK3, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACE),
    ),
    "deepseek_llm": _splits(
        r"[\r\n]",
        r"\s?[" + _CASED_LETTERS + "]+",
        r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _EAST_ASIAN,
        r"\p{N}+",
    ),
    "deepseek_coder": _splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    "falcon": (_split(r"[\p{P}\$\+<=>\^~\|`]+"), _GPT2, _split("[0-9][0-9][0-9]")),
    # The bytes come last here: spelled as bytes, other characters would be taken for digits.
    "default": _splits(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
    "bailingmoe": _splits(
        _any(
            r"'(?i:[sdmt]|ll|ve|re)",
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"\s*[\r\n]",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
    "seed_coder": _splits(
        _any(_CONTRACTION, _WORD, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACE)
    ),
    "exaone_moe": _splits(
        _any(
            _CONTRACTION,
            r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            r"\s*[\r\n]",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
    "minicpm5": _splits(r"\p{N}{1,3}", _any(_CONTRACTION, _WORD, r"\p{N}+", _PUNCTUATION, _SPACE)),
    "ufakzeka": _splits(_any(_WORD, r"\p{N}", _PUNCTUATION, _SPACE)),
    "laguna": _splits(r"[^\n]+|[\n]+", _QWEN2),
    "bloom": _splits(_BLOOM),
    "viking": _splits(_BLOOM, r"\p{N}"),
    "superbpe": _splits(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "chameleon": (
        _split("<sentinel:[0-9]+>"),
        _split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
        _split(r"([\t\n]|    |  )"),
        _EACH_DIGIT,
        _split(r"[\p{P}!-/:-@\[-`{-~]"),
        _GPT2,
    ),
    # Byte pair encoding of plain text, as in SentencePiece: there is nothing to cut.
    "plain_text": (),
}


@dataclass(frozen=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` stands for.

    `steps` are the pre-tokenizers of a `tokenizer.json`, in order. `byte_level`
    says that tokens are spelled in GPT-2's byte alphabet (else in plain text,
    with U+2581 for a space and <0x00> to <0xFF> for single bytes). `ignore_merges`
    lets a word that is a token stand without merging. `compose` asks for Unicode
    composition (NFC) first. `add_bos` is llama.cpp's default where the file
    doesn't say. `double_separator` marks RoBERTa's two separators in a pair.
    """

    family: str
    steps: tuple[Step, ...]
    byte_level: bool = True
    ignore_merges: bool = False
    compose: bool = False
    add_bos: bool = False
    double_separator: bool = False


# Family, names, and what sets them apart. Neither GGUF nor llama.cpp knows of composition; the
# tokenizer classes of those vocabularies in transformers do it (Qwen2Tokenizer, Qwen3_5Tokenizer,
# CohereTokenizer, GPTNeoXTokenizer).
_ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "llama3",
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        ("ignore_merges", "add_bos"),
    ),
    ("llama3", "glm4 glm5", ("ignore_merges",)),
    ("llama3", "chatglm-bpe dbrx smaug-bpe", ()),
    ("qwen2", "qwen2 deepseek-r1-qwen f2llmv2", ("compose",)),
    ("qwen2", "kormo megrez stablelm2 hunyuan solar-open grok-2", ()),
    ("qwen35", "qwen35", ("compose",)),
    ("gpt4o", "gpt-4o llama4 kanana2 talkie minimax-m2", ()),
    ("gpt4o", "granite-embed-multi-97m", ("ignore_merges",)),
    ("tiny_aya", "tiny_aya cohere2moe", ()),
    ("tekken", "tekken", ("ignore_merges", "add_bos")),
    ("kimi_k2", "kimi-k2", ()),
    ("youtu", "youtu", ("ignore_merges",)),
    ("jais2", "jais-2", ()),
    ("gpt2", "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum", ()),
    ("gpt2", "modern-bert jais trillion granite-docling exaone4", ()),
    ("gpt2", "jina-v1-en jina-v2-code roberta-bpe", ("double_separator",)),
    ("gpt2", "mpt olmo", ("compose",)),
    ("digits", "starcoder refact smollm codeshell exaone minerva-7b mellum2", ()),
    ("digits", "command-r", ("compose",)),
    ("deepseek3", "deepseek-v3 hunyuan-dense joyai-llm hy_v4", ()),
    ("spark25", "spark2_5", ()),
    ("afmoe", "afmoe", ()),
    ("deepseek_llm", "deepseek-llm", ()),
    ("deepseek_coder", "deepseek-coder", ()),
    ("falcon", "falcon", ()),
    ("bailingmoe", "bailingmoe bailingmoe2 llada-moe", ()),
    ("seed_coder", "seed-coder", ()),
    ("exaone_moe", "exaone-moe", ()),
    ("minicpm5", "minicpm5", ("ignore_merges",)),
    ("ufakzeka", "ufakzeka", ()),
    ("laguna", "laguna", ()),
    ("bloom", "poro-chat bloom gpt3-finnish", ()),
    ("viking", "viking", ()),
    ("superbpe", "superbpe", ()),
    ("chameleon", "chameleon", ("add_bos",)),
    ("plain_text", "gemma4 granite-embed-multi-311m", ("add_bos",)),
    ("plain_text", "sarvam-moe", ()),
    ("default", "default", ()),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: PreTokenizer(
        family,
        _FAMILIES[family],
        byte_level=family != "plain_text",
        **dict.fromkeys(traits, True),
    )
    for family, names, traits in _ROWS
    for name in names.split()
}
"""Every name of `tokenizer.ggml.pre` that can be expressed in a `tokenizer.json`."""
