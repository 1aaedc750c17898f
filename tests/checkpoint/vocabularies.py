"""What the tests of tokenizers share: vocabularies, texts, and llama.cpp's own tokenizer."""

import ctypes
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gguf2st.checkpoint.tokenizer import TokenizerFiles, build_tokenizer
from gguf2st.gguf.container import GgufFile
from tests.oracles import llama_cpp, real_models
from tests.oracles.llama_cpp_source import llama_cpp_source

# The vocabularies of llama.cpp's source that come with test vectors.
WITH_VECTORS = (
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
_REAL = {"smollm2": real_models.smollm2, "gemma3": real_models.gemma3_270m}


def path(name: str) -> Path:
    return _REAL[name]() if name in _REAL else models() / f"ggml-vocab-{name}.gguf"


def models() -> Path:
    return llama_cpp_source() / "models"


def metadata(name: str) -> Mapping[str, Any]:
    return GgufFile(path(name)).metadata


seconds: dict[str, float] = {}  # processor time that building took


@cache
def files(name: str) -> TokenizerFiles:
    """Treat as read-only: it is built once."""
    content = metadata(name)
    start = time.process_time()
    built = build_tokenizer(content, vocab_size=None, max_length=1024)
    seconds[name] = time.process_time() - start
    return built


@cache
def tokenizer(name: str) -> Tokenizer:
    """The written tokenizer, as the tokenizers library reads it; read-only."""
    return load(files(name).tokenizer_json)


@contextmanager
def uncomposed(name: str) -> Iterator[Tokenizer]:
    """The same without Unicode composition, which llama.cpp doesn't do."""
    written = tokenizer(name)
    normalizer = written.normalizer
    if files(name).tokenizer_json["normalizer"] == {"type": "NFC"}:
        written.normalizer = None
    yield written
    if normalizer is not None:
        written.normalizer = normalizer


def load(content: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))


def write(folder: Path, written: TokenizerFiles, **config: Any) -> Path:
    """A directory that transformers loads a tokenizer from."""
    for file, content in (
        ("tokenizer.json", written.tokenizer_json),
        ("tokenizer_config.json", written.tokenizer_config),
        ("config.json", config),
    ):
        (folder / file).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


class RuntimeVocabulary:
    """llama.cpp's own tokenizer, of a file whose weights (if any) stay unread."""

    def __init__(self, file: Path) -> None:
        self._library = llama_cpp._library()
        parameters = self._library.llama_model_default_params()
        parameters.vocab_only = True
        self._model = self._library.llama_model_load_from_file(str(file).encode(), parameters)
        assert self._model, f"llama.cpp can't load {file}: {llama_cpp._last_error()}"
        self._vocabulary = self._library.llama_model_get_vocab(self._model)

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        raw = text.encode()
        room = len(raw) + 8
        out = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(
            self._vocabulary, raw, len(raw), out, room, add_special, True
        )
        assert count >= 0
        return list(out[:count])

    def close(self) -> None:
        self._library.llama_model_free(self._model)


@contextmanager
def runtime(file: Path) -> Iterator[RuntimeVocabulary]:
    vocabulary = RuntimeVocabulary(file)
    try:
        yield vocabulary
    finally:
        vocabulary.close()


_SENTENCES = (
    "Hello world the quick BROWN foxJumps 's 'S don't I'LL we'Ve r\u00e9sum\u00e9 na\u00efve",
    "Stra\u00dfe \u0391\u0392\u0393 \u03b4\u03bf\u03ba\u03b9\u03bc\u03ae \u041f\u0440\u0438\u0432\u0435\u0442",
    "\u4f60\u597d\u4e16\u754c \u65e5\u672c\u8a9e\u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e44\u0e17\u0e22 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 3.14159 1234567 12 007 \u00bd \u00b2 \u2167",
    "x_y foo.bar() === != -> /path/to C++ #tag @me $5 \u20ac9 \u2026 \u2014",
    '\u201cquote\u201d "q" `code` ``` \U0001f999 \u2764\ufe0f e\u0301',
)
_WORDS = [word for sentence in _SENTENCES for word in sentence.split()]
_SPACES = ["", " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n", "\t\t", "\u00a0", "\u3000"]
_SCRIPTS = (
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x5D0, 0x5EA),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE5B),
    (0x1E00, 0x1FFF),
    (0x2000, 0x206F),
    (0x2100, 0x218F),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xFF00, 0xFFEF),
    (0x10400, 0x1044F),
    (0x1F300, 0x1F64F),
)


def texts(count: int, specials: Sequence[str] = ("<|x|>",), seed: int = 1) -> list[str]:
    """Varied texts, the same for the same arguments: words, scripts, spaces, digits, specials."""
    chance = random.Random(seed)

    def scripts(length: int) -> str:
        return "".join(chr(chance.randint(*chance.choice(_SCRIPTS))) for _ in range(length))

    def spaces() -> str:
        return chance.choice(_SPACES) * chance.randint(1, 9)

    def word() -> str:
        return chance.choice(_WORDS)

    kinds = (
        lambda: "".join(word() + chance.choice(_SPACES) for _ in range(chance.randint(1, 12))),
        lambda: scripts(chance.randint(1, 40)),
        lambda: "".join(spaces() for _ in range(chance.randint(1, 6))) + word(),
        lambda: "".join(chance.choices("0123456789", k=chance.randint(1, 20))) + word(),
        lambda: word() + chance.choice("!?.,;:-=+*/#'") * chance.randint(1, 20) + spaces() + word(),
        lambda: "".join(
            chance.choice([chance.choice(specials), word(), spaces()])
            for _ in range(chance.randint(1, 9))
        ),
        lambda: " ".join(word() for _ in range(chance.randint(5, 40))),
        lambda: "".join(chance.choices("abcABC 012\n'.,", k=chance.randint(1, 40))),
    )
    edges = ["", " ", "\n", "a" * 300, " " * 40, "\n" * 40, "\t" * 40, " " * 70 + "x"]
    return edges + [kinds[number % len(kinds)]() for number in range(count)]
