"""llama.cpp's source tree, as the source distribution of llama-cpp-python carries it."""

import os
import tarfile
from pathlib import Path

from tests.oracles.downloads import cached, pip_download

_REQUIREMENT = "llama-cpp-python==0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_ROOT = "llama_cpp_python-0.3.36/vendor/llama.cpp/"
# The vocabularies with their test vectors, the code that reads them, and the converter.
_KEPT = ("models/", "src/llama-vocab.cpp", "conversion/", "gguf-py/", "convert_hf_to_gguf.py")
# What it takes to compile ggml's reference decoders.
_GGML = tuple(
    f"ggml/{name}"
    for name in (
        "include/",
        "src/ggml-quants.",
        "src/ggml-common.h",
        "src/ggml-impl.h",
        "src/ggml-cpu/ggml-cpu-impl.h",
    )
)


def llama_cpp_source() -> Path:
    """The root of llama.cpp's source; GGUF2ST_LLAMA_CPP names another checkout to use."""
    elsewhere = os.environ.get("GGUF2ST_LLAMA_CPP")
    if elsewhere:
        return Path(elsewhere)
    return cached("llama.cpp-0.3.36", lambda folder: _obtain(folder, _KEPT))


def ggml_source() -> Path:
    """The root of ggml's source in the same tree."""
    elsewhere = os.environ.get("GGUF2ST_LLAMA_CPP")
    if elsewhere:
        return Path(elsewhere) / "ggml"
    return cached("ggml-0.3.36", lambda folder: _obtain(folder, _GGML)) / "ggml"


def _obtain(folder: Path, kept: tuple[str, ...]) -> Path:
    # pip asks the build backend for the name and version, which takes a minute but compiles
    # nothing; without build isolation the backend would have to be installed already.
    archive = pip_download(folder, _REQUIREMENT, _SHA256, "--no-binary", ":all:")
    with tarfile.open(archive) as opened:
        members = [
            member
            for member in opened
            if member.name.startswith(tuple(_ROOT + name for name in kept))
        ]
        opened.extractall(folder, members, filter="data")
    return folder / _ROOT
