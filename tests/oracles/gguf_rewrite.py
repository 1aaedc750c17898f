"""Writes a GGUF file again with its tensors in other types: ggml's own codecs, all keys kept.

This is how llama.cpp's arithmetic is asked about exactly the numbers of a quantized file. Run on
the quantized file itself it would quantize the activations too.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.oracles import ggml

_KEY_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32, _F32 = 8, 9, 4, 0


@dataclass
class Tensor:
    """A tensor as the file stores it; `shape` has the innermost dimension first."""

    name: str
    shape: tuple[int, ...]
    code: int
    data: bytes

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def requantize_to_f32(source: str | Path, target: str | Path) -> None:
    """Write `source` with every tensor decoded to F32."""
    names = {code: name for name, code in ggml.codes().items()}

    def decode(tensor: Tensor) -> Tensor:
        if tensor.code == _F32:
            return tensor
        values = ggml.dequantize(names[tensor.code], tensor.data, tensor.count)
        return Tensor(tensor.name, tensor.shape, _F32, values.tobytes())

    rewrite(source, target, decode)


def quantize(source: str | Path, target: str | Path, type_name: str) -> None:
    """Write an F32 `source` with every weight matrix of fitting width in one type.

    llama-quantize --pure does the same; its mixtures (Q4_K_M ...) can't be had here, because the
    wheel's library was linked without llama_model_quantize.
    """
    code, width = ggml.codes()[type_name], ggml.block_size(type_name)

    def encode(tensor: Tensor) -> Tensor:
        matrix = tensor.name.endswith(".weight") and len(tensor.shape) > 1
        keeps_f32 = ("_norm.", "ffn_gate_inp", "ssm_conv1d", "position_embd", "patch_embd")
        if not matrix or tensor.shape[0] % width or any(part in tensor.name for part in keeps_f32):
            return tensor
        values = np.frombuffer(tensor.data, np.float32).reshape(-1, tensor.shape[0])
        return Tensor(tensor.name, tensor.shape, code, ggml.quantize(type_name, values))

    rewrite(source, target, encode)


def rewrite(source: str | Path, target: str | Path, change: Callable[[Tensor], Tensor]) -> None:
    """Copy the keys of a little-endian GGUF file as they are, and its tensors through `change`."""
    rewrite_all(source, target, lambda tensors: list(map(change, tensors)))


def rewrite_all(
    source: str | Path, target: str | Path, change: Callable[[list[Tensor]], list[Tensor]]
) -> None:
    """The same with a `change` that may join tensors or leave some out."""
    raw = Path(source).read_bytes()
    header, keys, tensors, alignment = _read(raw)
    tensors = change(tensors)
    header = header[:8] + struct.pack("<Q", len(tensors)) + header[16:]
    infos, data = bytearray(), bytearray()
    for tensor in tensors:
        infos += struct.pack("<Q", len(tensor.name.encode())) + tensor.name.encode()
        infos += struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        infos += struct.pack("<IQ", tensor.code, len(data))
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    start = header + keys + infos
    Path(target).write_bytes(start + bytes(-len(start) % alignment) + data)


def _read(raw: bytes) -> tuple[bytes, bytes, list[Tensor], int]:
    magic, version, tensor_count, key_count = struct.unpack_from("<4sIQQ", raw)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"not a GGUF file of version 2 or 3: {magic!r}, {version}")
    position, alignment = 24, 32

    def string() -> str:
        nonlocal position
        (length,) = struct.unpack_from("<Q", raw, position)
        position += 8 + length
        return raw[position - length : position].decode()

    def skip(kind: int) -> None:
        nonlocal position
        if kind == _STRING:
            string()
        elif kind == _ARRAY:
            element, count = struct.unpack_from("<IQ", raw, position)
            position += 12
            if element in _KEY_SIZES:
                position += count * _KEY_SIZES[element]
            else:
                for _ in range(count):
                    skip(element)
        else:
            position += _KEY_SIZES[kind]

    for _ in range(key_count):
        name = string()
        (kind,) = struct.unpack_from("<I", raw, position)
        position += 4
        if name == "general.alignment" and kind == _UINT32:
            (alignment,) = struct.unpack_from("<I", raw, position)
        skip(kind)
    keys_end = position

    infos = []
    for _ in range(tensor_count):
        name = string()
        (rank,) = struct.unpack_from("<I", raw, position)
        shape = struct.unpack_from(f"<{rank}Q", raw, position + 4)
        code, offset = struct.unpack_from("<IQ", raw, position + 4 + 8 * rank)
        position += 16 + 8 * rank
        infos.append((name, shape, code, offset))
    start = position + -position % alignment

    names = {code: name for name, code in ggml.codes().items()}
    tensors = []
    for name, shape, code, offset in infos:
        size = 4 * int(np.prod(shape, dtype=np.int64))
        if code != _F32:
            size = size // 4 // ggml.block_size(names[code]) * ggml.block_bytes(names[code])
        tensors.append(Tensor(name, shape, code, raw[start + offset : start + offset + size]))
    return raw[:24], raw[24:keys_end], tensors, alignment
