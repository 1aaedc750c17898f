"""ggml's C code, called in the shared library of an installed xllamacpp wheel.

The library is opened without importing the package, so nothing of its Python
side runs. Names and numbers of types come from the library too, not from
gguf2st.
"""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np

_LAST_TYPE = 42
_DECODE_FUNCTIONS = {"f16": "ggml_fp16_to_fp32_row", "bf16": "ggml_bf16_to_fp32_row"}


def available() -> bool:
    """Whether an xllamacpp wheel with its library is installed."""
    return _library_path() is not None


def codes() -> dict[str, int]:
    """The numbers of the types that the library decodes, by name in capitals."""
    return dict(_codes())


def block_size(name: str) -> int:
    """How many elements a block holds."""
    return _library().ggml_blck_size(_codes()[name])


def block_bytes(name: str) -> int:
    """How many bytes a block takes."""
    return _library().ggml_type_size(_codes()[name])


def dequantize(name: str, raw: bytes, count: int) -> np.ndarray:
    """Decode `count` elements of type `name` ("Q4_K") with ggml's reference: float32 (count,)."""
    if count // block_size(name) * block_bytes(name) != len(raw) or count % block_size(name):
        raise ValueError(f"{len(raw)} bytes aren't {count} elements of {name}")
    out = np.empty(count, np.float32)
    _decode_function(name)(raw, out.ctypes.data, count)
    return out


def quantize(name: str, values: np.ndarray) -> bytes:
    """Quantize rows (an array of one dimension is one row) with ggml_quantize_chunk.

    Types that need importance weights get equal ones.
    """
    library = _library()
    code = _codes()[name]
    rows = np.ascontiguousarray(np.atleast_2d(values), np.float32)
    if rows.shape[1] % block_size(name):
        raise ValueError(f"rows of {rows.shape[1]} elements aren't whole blocks of {name}")
    out = ctypes.create_string_buffer(rows.size // block_size(name) * block_bytes(name))
    weights = np.ones(rows.shape[1], np.float32)
    needed = library.ggml_quantize_requires_imatrix(code)
    library.ggml_quantize_chunk(
        code, rows.ctypes.data, out, 0, *rows.shape, weights.ctypes.data if needed else None
    )
    return out.raw


def _library_path() -> Path | None:
    found = importlib.util.find_spec("xllamacpp")
    for folder in (found and found.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.so")):
            return path
    return None


@cache
def _library() -> ctypes.CDLL:
    path = _library_path()
    if path is None:
        raise RuntimeError("the oracle needs xllamacpp: pip install --no-deps xllamacpp")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


@cache
def _codes() -> dict[str, int]:
    names = {}
    for code in range(_LAST_TYPE + 1):
        name = _library().ggml_type_name(code)
        if name and hasattr(_library(), _symbol(name.decode())):
            names[name.decode().upper()] = code
    # Q8_K has a decoder, but only ggml's dot products use it.
    del names["Q8_K"]
    return names


def _symbol(ggml_name: str) -> str:
    return _DECODE_FUNCTIONS.get(ggml_name, f"dequantize_row_{ggml_name}")


@cache
def _decode_function(name: str):
    ggml_name = _library().ggml_type_name(_codes()[name]).decode()
    function = getattr(_library(), _symbol(ggml_name))
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    return function
