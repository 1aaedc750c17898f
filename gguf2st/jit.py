"""The one way in which this package compiles its inner loops."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event

# Numba's own types describe options that a decorator with `**options` can't be checked against.
_njit: Any = numba.njit


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a module-level function with numba when it is first called, and keep the result on disk.

    The compiled function releases the GIL, so threads of Python run it side by side.
    Without fast-math, LLVM neither reorders sums nor fuses a product with a sum: the
    same input gives the same bytes on every machine, whatever vectors it has. Division
    follows IEEE 754 (x / 0 is an infinity, no exception), which loops need to become
    vector code.

    What it calls is compiled into it, from wherever in this package it comes: what was kept
    counts until a file of the package changes.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Any = _njit(cache=True, **options)(function)
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written: compile each time.
        return _njit(**options)(function)  # type: ignore[no-any-return]
    # Numba by itself looks at the function's own file alone.
    compiled._cache._cache_file._source_stamp = _package_stamp()
    return compiled  # type: ignore[no-any-return]


@cache
def _package_stamp() -> tuple[int, int]:
    """When the package's files were last changed, and their size."""
    found = [path.stat() for path in Path(__file__).parent.rglob("*.py")]
    return max(each.st_mtime_ns for each in found), sum(each.st_size for each in found)


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a part of the kernels that call it, to be put into each place where it is called.

    It is for loops over single numbers; what computes with vectors is a `vectors.formula`.
    """
    return _njit(  # type: ignore[no-any-return]
        error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )(function)


class CompileWatch(event.Listener):
    """Measures how long kernels are being compiled; `seconds` of wall time, in all threads together.

    Loading what an earlier process compiled doesn't count.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._begins, self._active, self._since = begins, 0, 0.0
        self._lock = threading.Lock()

    def on_start(self, event: Any) -> None:
        """A compilation begins, maybe within another."""
        with self._lock:
            self._active += 1
            if self._active > 1:
                return
            self._since = time.monotonic()
        self._begins()

    def on_end(self, event: Any) -> None:
        """A compilation ends."""
        with self._lock:
            self._active -= 1
            if not self._active:
                self.seconds += time.monotonic() - self._since


@contextlib.contextmanager
def watched(begins: Callable[[], None]) -> Iterator[CompileWatch]:
    """Call `begins` whenever kernels have to be compiled inside the block, and measure it."""
    watch = CompileWatch(begins)
    with event.install_listener("numba:compile", watch):
        yield watch
