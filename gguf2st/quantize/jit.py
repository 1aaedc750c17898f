"""The one way in which this package compiles its inner loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import extending

# Numba's own types describe options that a decorator with `**options` can't be checked against.
_njit: Any = numba.njit
_intrinsic: Any = extending.intrinsic


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a module-level function with numba when it is first called, and keep the result on disk.

    The compiled function releases the GIL, so threads of Python run it side by side.
    Without fast-math, LLVM neither reorders sums nor fuses a product with a sum: the
    same input gives the same bytes on every machine, whatever vectors it has. Division
    follows IEEE 754 (x / 0 is an infinity, no exception), which loops need to become
    vector code.

    What it calls is compiled into it. Numba notices that a file has changed only for the
    function's own file, so kernels call kernels of the same file.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return _njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written: compile each time.
        return _njit(**options)(function)  # type: ignore[no-any-return]


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a part of each kernel that calls it, so that it isn't compiled twice.

    For what only calls kernels. Inner loops have to stay functions of their own: there, the
    compiler sees which arrays are distinct, and makes vector code.
    """
    return _njit(inline="always")(function)  # type: ignore[no-any-return]


@_intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding, as IEEE 754 defines it, so alike on every machine."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return c(c, c, c), generate
