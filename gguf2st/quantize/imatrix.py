"""Importance matrices of llama.cpp: the mean square of what each column is multiplied with.

`llama-imatrix` sums up squared activations while a model runs over a text. The squared
error of a weight, times the mean square of its column, is about what that error does to
the layer's output. Formats: `save_imatrix` and `save_imatrix_legacy` in llama.cpp's
tools/imatrix/imatrix.cpp, and `common_imatrix_load` in its common/imatrix-loader.cpp.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf2st.errors import InputError
from gguf2st.gguf.blocks import values_rows
from gguf2st.gguf.container import MAGIC, GgufFile, TensorInfo

Importance = dict[str, npt.NDArray[np.float32]]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_ENTRIES = 1_000_000


def read_importance(path: str | os.PathLike[str]) -> Importance:
    """The mean squares of an importance matrix, by the GGUF names of the tensors.

    An entry is float32 (columns,), or (experts, columns) for experts that lie in one
    tensor. The old format doesn't say where one expert ends and the next begins: there
    such an entry is (experts * columns,). Tensors that never ran are missing; of experts,
    one that never ran gets 1 for each column, as in llama.cpp.

    Args:
        path: a file of `llama-imatrix`, GGUF or the old binary form (often ".dat").

    Raises:
        InputError: the file can't be read, is damaged, or is no importance matrix.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
            # The old format begins with a number of entries. Anything else isn't read: it may
            # be a whole model.
            old = 0 < int.from_bytes(magic, "little") <= _MOST_ENTRIES
            rest = stream.read() if old else b""
    except OSError as error:
        raise InputError(
            f"{path} can't be read ({error.strerror}); check the path and its permissions."
        ) from error
    if magic != MAGIC and not old:
        raise InputError(f"{path} is no importance matrix; give a file that llama-imatrix made.")
    found = _from_gguf(path) if magic == MAGIC else _from_legacy(path, magic + rest)
    if not found:
        raise InputError(
            f"{path} holds no importance of any tensor; make it again with llama-imatrix."
        )
    return found


def _from_gguf(path: Path) -> Importance:
    tensors = GgufFile(path).tensors
    if not any(name.endswith(_SUMS) for name in tensors):
        raise InputError(
            f"{path} is a GGUF file but no importance matrix (no tensor is named *{_SUMS}); "
            "give a file that llama-imatrix made."
        )
    found: Importance = {}
    for full_name, tensor in tensors.items():
        name = full_name.removesuffix(_SUMS)
        if name == full_name:
            continue
        counts = tensors.get(name + _COUNTS)
        if counts is None:
            raise _damaged(path, f"{name} has sums but no counts")
        experts = counts.elements
        if tensor.elements % experts or (experts > 1 and tensor.row_count != experts):
            raise _damaged(path, f"{name} has sums of shape {tensor.shape} and {experts} counts")
        sums, number = _numbers(path, tensor), _numbers(path, counts)
        if number.max() == 0:
            continue
        ran = number > 0
        means = np.ones((experts, tensor.elements // experts), np.float32)
        with np.errstate(over="ignore"):
            means[ran] = sums.reshape(means.shape)[ran] / number[ran, None]
        _checked(path, name, means)
        found[name] = means if experts > 1 else means[0]
    return found


def _numbers(path: Path, tensor: TensorInfo) -> npt.NDArray[np.float64]:
    if tensor.kind.name != "F32":
        raise _damaged(path, f"{tensor.name} has type {tensor.kind.name}, not F32")
    raw = tensor.read_rows(0, tensor.row_count)
    numbers = values_rows(tensor.kind, raw, tensor.columns, big_endian=tensor.file.big_endian)
    return _checked(path, tensor.name, numbers.reshape(-1))


def _checked(path: Path, name: str, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise _damaged(path, f"{name} holds a number that is negative or not finite")
    return numbers.astype(np.float64)


def _damaged(path: Path, what: str) -> InputError:
    return InputError(
        f"{path} isn't a sound importance matrix: {what}; make it again with llama-imatrix."
    )


def _from_legacy(path: Path, raw: bytes) -> Importance:
    """Read int32 entries; of each, int32 length, name, int32 calls, int32 n, n float32 sums."""
    found: Importance = {}
    position = 4
    try:
        (entries,) = struct.unpack_from("<i", raw)
        # The smallest entry has a name of one byte and one sum.
        if not 0 < entries <= len(raw) // 17:
            raise _damaged(path, f"it claims {entries:,} entries in {len(raw):,} bytes")
        for index in range(entries):
            (length,) = struct.unpack_from("<i", raw, position)
            if not 0 < length <= len(raw) - position - 4:
                raise _damaged(path, f"entry {index} has a name of {length:,} bytes")
            position += 4
            name = raw[position : position + length].decode("utf-8", "surrogateescape")
            position += length
            calls, size = struct.unpack_from("<ii", raw, position)
            position += 8
            if not 0 < size <= (len(raw) - position) // 4:
                raise _damaged(path, f"entry {name!r} claims {size:,} numbers")
            if name in found or calls < 0:
                raise _damaged(path, f"entry {name!r} is there twice or has {calls} calls")
            sums = _checked(path, name, np.frombuffer(raw, "<f4", size, position))
            position += 4 * size
            # llama.cpp reads sums of 0 calls as means.
            found[name] = (sums / max(calls, 1)).astype(np.float32)
    except struct.error as error:
        raise _damaged(path, f"it ends after {len(raw):,} bytes, inside an entry") from error
    return found
