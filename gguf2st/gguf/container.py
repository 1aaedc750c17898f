"""One GGUF file: its keys, its tensor index, and the bytes of its tensors.

The format is described by ggml's `docs/gguf.md` and read by
`gguf_init_from_file` in ggml's `src/gguf.cpp`. Everything in a file is
hostile until checked: each count, length, offset and shape is compared with
the bytes that are really there before it is used. Arrays (a vocabulary may
hold 260,000 strings) are stepped over when a file is opened and decoded only
when somebody asks for them.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.buffers import Buffers
from gguf2st.errors import InputError, UnsupportedError
from gguf2st.gguf.blocks import BlockType, block_type
from gguf2st.gguf.metadata import Metadata, PackedArray, PackedString

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAXIMUM_DIMENSIONS = 4  # GGML_MAX_DIMS
MAXIMUM_NAME_BYTES = 63  # GGML_MAX_NAME with its terminating zero is 64
MAXIMUM_KEY_BYTES = 65_535  # docs/gguf.md
MAXIMUM_STRINGS = 1 << 24  # of one array; the largest vocabularies have a million
STRING, ARRAY = 8, 9

# value type -> struct code; the numbers are those of enum gguf_type
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

_MISTAKEN = (
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself; fetch the real file"),
    (b"<", "a web page, not a model; download the file itself, not the page that shows it"),
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint, not a GGUF file"),
    (b"lmgg", "in the GGML format that came before GGUF; convert it again with llama.cpp"),
    (b"fmgg", "in the GGMF format that came before GGUF; convert it again with llama.cpp"),
    (b"tjgg", "in the GGJT format that came before GGUF; convert it again with llama.cpp"),
)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it is.

    `shape` is in torch order (slowest axis first, the reverse of ggml's `ne`);
    `offset` is absolute in `file`, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    file: GgufFile
    offset: int
    nbytes: int

    @property
    def columns(self) -> int:
        """Elements of one row: the last axis, along which blocks run."""
        return self.shape[-1]

    @property
    def row_count(self) -> int:
        """Rows of all leading axes together."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Packed bytes of one row."""
        return self.columns // self.kind.block_size * self.kind.block_bytes

    @property
    def elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    def read_rows(
        self, start: int, stop: int, buffers: Buffers | None = None
    ) -> npt.NDArray[np.uint8]:
        """Packed blocks of rows `start` to `stop`, uint8 of shape (rows, row_bytes)."""
        offset, nbytes = self.offset + start * self.row_bytes, (stop - start) * self.row_bytes
        return self.file.read(offset, nbytes, buffers).reshape(stop - start, self.row_bytes)


class GgufFile:
    """An open GGUF file (version 2 or 3, either byte order, any alignment).

    Raises `InputError` for a file that isn't GGUF or is damaged, naming the byte
    or the tensor, and `UnsupportedError` for a version or a tensor type that
    isn't known.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            mode = self.path.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe could block
                raise InputError(
                    f"{self.path} isn't a regular file; write the model to a file and give that."
                )
            with self.path.open("rb") as stream:
                self.size = os.fstat(stream.fileno()).st_size
                self._descriptor = os.dup(stream.fileno())
                self._map = (
                    mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
                )
        except OSError as error:
            raise InputError(
                f"{self.path} can't be opened ({error.strerror}); check the path and its permissions."
            ) from error
        try:
            self._read_header()
        except struct.error as error:
            raise InputError(
                f"{self.path} ends inside its header (the file has {self.size:,} bytes); "
                "the download is incomplete, fetch it again."
            ) from error
        finally:
            # The header's pages count as resident memory as long as they stay mapped in.
            if hasattr(mmap, "MADV_DONTNEED") and isinstance(self._map, mmap.mmap):
                self._map.madvise(mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"GgufFile({str(self.path)!r}, {len(self.tensors)} tensors)"

    def read(
        self, offset: int, nbytes: int, buffers: Buffers | None = None
    ) -> npt.NDArray[np.uint8]:
        """`nbytes` bytes from `offset`, as uint8; safe to call from several threads.

        They lie in the calling thread's buffer "raw" when there are `buffers`.
        """
        if hasattr(os, "preadv"):
            # preadv, not the map: pages of a map count as resident memory until they are dropped.
            shape = (nbytes,)
            buffer = buffers.take("raw", shape, np.uint8) if buffers else np.empty(shape, np.uint8)
            view, done = buffer.data, 0
            while done < nbytes:
                try:
                    step = os.preadv(self._descriptor, [view[done:]], offset + done)
                except OSError as error:
                    raise InputError(
                        f"{self.path} can't be read at byte {offset + done:,} ({error.strerror}); "
                        "check its disk, or copy the file anew."
                    ) from error
                if step == 0:
                    raise InputError(
                        f"{self.path} became shorter while it was read (byte {offset + done:,}); "
                        "another program is changing it, run again when it is done."
                    )
                done += step
            return buffer
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def forget(self, offset: int, nbytes: int) -> None:
        """Tell the system that it needn't keep these bytes in its cache: they are read once."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _fail(self, position: int, what: str) -> InputError:
        return InputError(
            f"{self.path} is damaged at byte {position:,}: {what}; fetch or convert the file again."
        )

    def _read_header(self) -> None:
        start = bytes(self._map[:64])
        if start[:4] != MAGIC:
            raise InputError(f"{self.path} is {_what_it_is(start)}.")
        (version,) = struct.unpack_from("<I", self._map, 4)
        # A big-endian file has the same magic; its version, read the wrong way round, ends in zeros.
        self.big_endian = version & 0xFFFF == 0
        order = self._order = ">" if self.big_endian else "<"
        (version,) = struct.unpack_from(order + "I", self._map, 4)
        if version not in (2, 3):
            advice = (
                "convert the model again with a llama.cpp of October 2023 or later"
                if version == 1
                else "a newer gguf2st may know it"
            )
            raise UnsupportedError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 are supported, {advice}."
            )
        self.version = version
        tensor_count, key_count = struct.unpack_from(order + "QQ", self._map, 8)
        # The smallest key takes 13 bytes and the smallest tensor entry 24, so these can't be exceeded.
        if key_count > self.size // 13 or tensor_count > self.size // 24:
            raise self._fail(
                8,
                f"it claims {tensor_count:,} tensors and {key_count:,} keys, more than fit in the file",
            )
        position = self._read_keys(24, key_count)
        self._read_tensors(position, tensor_count)

    def _step_over_string(self, position: int) -> PackedString:
        (length,) = struct.unpack_from(self._order + "Q", self._map, position)
        end = position + 8 + length
        if end > self.size:
            raise self._fail(
                position, f"a string of {length:,} bytes runs past the end of the file"
            )
        return PackedString(position + 8, end)

    def _name(self, position: int, what: str, maximum_bytes: int) -> tuple[str, int]:
        packed = self._step_over_string(position)
        length = packed.end - packed.start
        if not 0 < length <= maximum_bytes:
            raise self._fail(
                position,
                f"the name of a {what} has {length:,} bytes, and 1 to {maximum_bytes:,} are allowed",
            )
        name = self._text(packed.start, packed.end)
        if not name.isprintable():  # it will stand in messages: it mustn't steer a terminal
            raise self._fail(position, f"the name {name[:80]!r} of a {what} isn't printable")
        return name, packed.end

    def _text(self, start: int, end: int) -> str:
        return self._map[start:end].decode("utf-8", "surrogateescape")

    def _read_keys(self, position: int, count: int) -> int:
        values: dict[str, Any] = {}
        for _ in range(count):
            at = position
            key, position = self._name(position, "key", MAXIMUM_KEY_BYTES)
            if key in values:
                raise self._fail(at, f"the key {key!r} is there twice")
            (value_type,) = struct.unpack_from(self._order + "I", self._map, position)
            position += 4
            values[key], position = self._value(key, value_type, position)
        self.metadata = Metadata(values, self._decode)
        return position

    def _value(self, key: str, value_type: int, position: int) -> tuple[Any, int]:
        if value_type == STRING:
            packed = self._step_over_string(position)
            return packed, packed.end
        if value_type == ARRAY:
            return self._step_over_array(key, position)
        code = SCALARS.get(value_type)
        if code is None:
            raise self._fail(
                position - 4, f"the key {key!r} has the unknown value type {value_type}"
            )
        (value,) = struct.unpack_from(self._order + code, self._map, position)
        return value, position + struct.calcsize("<" + code)

    def _step_over_array(self, key: str, position: int) -> tuple[PackedArray, int]:
        item_type, count = struct.unpack_from(self._order + "IQ", self._map, position)
        start = position + 12
        array = PackedArray(item_type, count, start)
        if item_type == STRING:
            # 8 bytes of length at least for each item, so a count beyond this is a lie.
            if count > min(MAXIMUM_STRINGS, (self.size - start) // 8):
                raise self._fail(position, f"the array {key!r} claims {count:,} strings")
            unpack, buffer, end = struct.Struct(self._order + "Q").unpack_from, self._map, start
            for _ in range(count):
                end += 8 + unpack(buffer, end)[0]
                if end > self.size:
                    raise self._fail(end, f"a string of the array {key!r} runs past the end")
            return array, end
        code = SCALARS.get(item_type)
        if code is None:
            kind = "nested arrays" if item_type == ARRAY else f"the unknown item type {item_type}"
            raise self._fail(position, f"the array {key!r} has {kind}")
        end = start + count * struct.calcsize("<" + code)
        if end > self.size:
            raise self._fail(
                position, f"the array {key!r} claims {count:,} items, past the file's end"
            )
        return array, end

    def _decode(self, packed: PackedString | PackedArray) -> str | list[str] | npt.NDArray[Any]:
        if isinstance(packed, PackedString):
            return self._text(packed.start, packed.end)
        if packed.item_type == STRING:
            items, position = [], packed.start
            unpack, buffer = struct.Struct(self._order + "Q").unpack_from, self._map
            for _ in range(packed.count):
                begin = position + 8
                position = begin + unpack(buffer, position)[0]
                items.append(buffer[begin:position].decode("utf-8", "surrogateescape"))
            return items
        dtype = np.dtype(self._order + SCALARS[packed.item_type])
        values = np.frombuffer(self._map, dtype, packed.count, packed.start)
        return values.astype(dtype.newbyteorder("="))

    def _read_tensors(self, position: int, count: int) -> None:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._fail(position, f"general.alignment is {alignment!r}, not a power of two")
        entries: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
        for _ in range(count):
            at = position
            name, position = self._name(position, "tensor", MAXIMUM_NAME_BYTES)
            if name in entries:
                raise self._fail(at, f"the tensor {name!r} is there twice")
            shape, position = self._shape(name, position)
            type_code, offset = struct.unpack_from(self._order + "IQ", self._map, position)
            try:
                kind = block_type(type_code)
            except UnsupportedError as error:
                raise UnsupportedError(f"{self.path}, tensor {name}: {error}") from error
            if shape[-1] % kind.block_size:
                raise self._fail(
                    position,
                    f"rows of tensor {name} have {shape[-1]} elements, "
                    f"which {kind.name} blocks of {kind.block_size} don't divide",
                )
            if offset % alignment:
                raise self._fail(
                    position + 4,
                    f"tensor {name} lies at offset {offset}, not a multiple of {alignment}",
                )
            entries[name] = shape, kind, offset
            position += 12
        self.data_start = -(-position // alignment) * alignment
        self.tensors = {
            name: TensorInfo(
                name,
                shape,
                kind,
                self,
                self.data_start + offset,
                math.prod(shape) // kind.block_size * kind.block_bytes,
            )
            for name, (shape, kind, offset) in entries.items()
        }
        self._check_extents()

    def _shape(self, name: str, position: int) -> tuple[tuple[int, ...], int]:
        (dimensions,) = struct.unpack_from(self._order + "I", self._map, position)
        if dimensions > MAXIMUM_DIMENSIONS:
            raise self._fail(position, f"tensor {name} has {dimensions} axes, and 4 are the most")
        extents = struct.unpack_from(f"{self._order}{dimensions}Q", self._map, position + 4)
        if not all(extents) or math.prod(extents) >= 1 << 56:
            raise self._fail(position, f"tensor {name} has the impossible shape {extents}")
        return tuple(reversed(extents)) or (1,), position + 4 + 8 * dimensions

    def _check_extents(self) -> None:
        end, previous = self.data_start, ""
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._fail(tensor.offset, f"the tensors {previous} and {tensor.name} overlap")
            end, previous = tensor.offset + tensor.nbytes, tensor.name
            if end > self.size:
                missing = sum(
                    max(0, other.offset + other.nbytes - max(self.size, other.offset))
                    for other in self.tensors.values()
                )
                raise InputError(
                    f"{self.path} is cut short: tensor {tensor.name} ends at byte {end:,} but the file "
                    f"has {self.size:,} bytes ({missing:,} bytes of tensors are missing); "
                    "the download is incomplete, fetch it again."
                )


def _what_it_is(start: bytes) -> str:
    if not start:
        return "empty (0 bytes); fetch it again"
    for prefix, meaning in _MISTAKEN:
        if start.lstrip().lower().startswith(prefix.lower()):
            return meaning
    if len(start) > 8 and start[8:9] == b"{":
        return "a safetensors file already; gguf2st reads GGUF"
    return (
        f"not a GGUF file (it starts with {start[:4]!r}, not b'GGUF'); if it is one part of a file "
        "that was cut with `split`, join the parts with `cat` first"
    )
