"""A GPU as the workers use it: packed rows go there, encoded rows come back.

Each worker has a stream and pinned buffers of its own, so while one worker's rows are copied,
those of another are computed and those of a third are written to disk.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gguf2st.arrays import as_tensor
from gguf2st.buffers import Buffers
from gguf2st.errors import UsageError
from gguf2st.gguf.blocks import decode_on_device
from gguf2st.mapping.view import SOURCE_SHIFT, View

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Elements that one worker has on the device at a time: 64 MB of float32, and a few times as much
# while they are quantized. What launching kernels takes is then small beside what they do.
CHUNK_ELEMENTS = 1 << 24
# What is smaller is done sooner by the CPU.
SMALLEST = 1 << 16
# Bytes that come back at a time.
PIECE_BYTES = 1 << 26
# Measured: what CUDA and torch take of the host's memory, and a worker's pinned buffers, in bytes.
BASE_MEMORY = 1_500_000_000
WORKER_MEMORY = PIECE_BYTES + 2 * CHUNK_ELEMENTS


def open_gpu(name: str) -> Gpu | None:
    """The device of that name, "cuda" or "cuda:1"; None for "cpu".

    Raises `UsageError` where there is no such device, or no torch to use it with.
    """
    if name == "cpu":
        return None
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if found is None:
        raise UsageError(f"--device {name!r} isn't one of cpu, cuda or cuda:N.")
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            f"--device {name} needs PyTorch, which can't be imported ({error}); install it with "
            "pip install 'gguf2st[cuda]', or leave --device out."
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UsageError(
            f"--device {name}: PyTorch {torch.__version__} finds no CUDA device; install a build of "
            "PyTorch with CUDA and the card's driver, or leave --device out."
        )
    if int(found[1] or 0) >= count:
        raise UsageError(
            f"--device {name}: the last of the {count} CUDA device(s) is cuda:{count - 1}."
        )
    return Gpu(torch.device("cuda", int(found[1] or 0)))


class Gpu:
    """A device on which rows are decoded and encoded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = _PinnedBuffers() if device.type == "cuda" else Buffers()
        self._own = threading.local()

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        """While this is open, what the thread does on the device is done in a stream of its own.

        Raises `UsageError` when the device's memory isn't enough.
        """
        import torch  # noqa: PLC0415

        try:
            if self._device.type != "cuda":
                yield
                return
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._own.stream):
                yield
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"the memory of {self._device} isn't enough for what the workers do at once; give "
                "fewer of them with --threads, or take --device cpu."
            ) from error

    def decoded(self, view: View, start: int, stop: int) -> Tensor:
        """Values of output rows of a view that has a `packed_type`: float32 (rows, width)."""
        self._wait()  # the copy before may still read the buffer
        raw = view.read_packed(start, stop, self._buffers)
        tensor = view.sources[int(view.rows.flat[start]) >> SOURCE_SHIFT].tensor
        packed, big_endian = self.upload(raw), tensor.file.big_endian
        values: Tensor = decode_on_device(tensor.kind, packed, view.width, big_endian=big_endian)
        return values

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy on the device."""
        host: Tensor = as_tensor(array)
        if self._device.type != "cuda":
            return host.clone()
        if not host.is_pinned():
            self._wait()
            staged = self._buffers.take("staged", array.shape, array.dtype)
            np.copyto(staged, array)
            host = as_tensor(staged)
        return host.to(self._device, non_blocking=True)

    def download(self, rows: Tensor) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Bytes of the rows, uint8 (some rows, row_bytes), and the number of the first of them.

        The array is valid until the next one.
        """
        import torch  # noqa: PLC0415

        flat = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)
        step = max(1, PIECE_BYTES // max(1, flat.shape[1]))
        for start in range(0, len(flat), step):
            piece = flat[start : start + step]
            host = self._buffers.take("rows", tuple(piece.shape), np.uint8)
            as_tensor(host).copy_(piece, non_blocking=True)
            self._wait()
            yield start, host

    def _wait(self) -> None:
        """Until all that this thread has begun on the device is done."""
        if self._device.type == "cuda":
            self._own.stream.synchronize()


class _PinnedBuffers(Buffers):
    """Buffers that a device can copy from and to while the CPU does something else."""

    def _allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        import torch  # noqa: PLC0415

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
