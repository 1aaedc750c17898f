"""ggml's reference decoders, compiled from llama.cpp's source for the machine at hand."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.gguf.blocks import BlockType
from tests.oracles.llama_cpp_source import ggml_source

FLAGS = ("-O3", "-march=native", "-fPIC", "-shared")


class NativeGgml:
    """`dequantize_row_*` of ggml/src/ggml-quants.c, and the same rounded to bfloat16."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            library = Path(scratch) / "ggml.so"
            self.compiler = _compile(library)
            self._library = ctypes.CDLL(str(library))
        self._rounded = self._library.decode_rounded
        self._rounded.restype = None
        self._rounded.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
        ]

    def decode(
        self, kind: BlockType, raw: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]
    ) -> None:
        """Decode contiguous blocks into float32."""
        self._function(kind)(raw.ctypes.data, out.ctypes.data, out.size)

    def decode_rounded(
        self, kind: BlockType, raw: npt.NDArray[np.uint8], out: npt.NDArray[np.uint16]
    ) -> None:
        """Decode contiguous blocks into bfloat16, strip by strip."""
        self._rounded(
            ctypes.cast(self._function(kind), ctypes.c_void_p),
            raw.ctypes.data,
            kind.block_bytes,
            kind.block_size,
            out.ctypes.data,
            out.size,
        )

    def _function(self, kind: BlockType) -> Any:
        name = kind.name.lower().replace("_k", "_K")  # "q4_K": as ggml spells it
        function = getattr(self._library, f"dequantize_row_{name}")
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        return function


def _compile(library: Path) -> str:
    """Compile and return the compiler's name for itself. Exits with a sentence when it can't."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("ggml's reference needs a C compiler; name one in CC, or give --no-ggml.")
    root = ggml_source()
    include = [f"-I{root / folder}" for folder in ("include", "src", "src/ggml-cpu")]
    sources = [root / "src/ggml-quants.c", Path(__file__).with_suffix(".c")]
    command = [compiler, *FLAGS, *include, *map(str, sources), "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{compiler} couldn't compile ggml:\n{done.stderr}")
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return " ".join([*shown.stdout.splitlines()[:1], *FLAGS[:2]])
