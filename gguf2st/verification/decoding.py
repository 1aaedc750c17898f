"""Weights of matrices, decoded from the files in chunks of rows.

Sources of the layouts: compressed_tensors' compressors/pack_quantized/helpers.py
(`unpack_from_int32`), naive_quantized/base.py, nvfp4/base.py and mxfp4/base.py; AutoAWQ's
utils/packing_utils.py; GPTQModel's nn_modules/qlinear/torch.py; transformers'
integrations/finegrained_fp8.py and mxfp4.py; SGLang's test of cutlass_w4a8_moe and its
modelopt_quant.py. Nothing here is
shared with what encodes these formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf2st.buffers import Buffers
from gguf2st.errors import InputError
from gguf2st.scheme import Scheme
from gguf2st.verification.grids import E2M1_SPACING, Grid, Rows, Runs, floating, integers, runs_of
from gguf2st.verification.numbers import E2M1, EIGHT_BITS, exponents, floats, opened
from gguf2st.verification.stored import FLOATS, Layout, Stored

Array = npt.NDArray[np.generic]
CHUNK_WEIGHTS = 4 << 20
# What is packed or scaled together begins at a multiple of this many rows.
ROW_MULTIPLE = 128
# Where in a word of AWQ's "gemm" order each of eight outputs lies.
_AWQ_PLACES = np.array((0, 4, 1, 5, 2, 6, 3, 7)) * 4
_GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")
_ONE, _NONE = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)

_buffers = Buffers()


@dataclass(frozen=True)
class Decoding:
    """What the tensors of a matrix alone can't tell.

    GPTQ's `zeros_less_one` are those of its format v1. `block` (rows, columns) are FP8's, where the
    config says them. `symmetric` stands for AWQ and GPTQ codes that need no zero points.
    """

    zeros_less_one: bool = True
    block: tuple[int, int] | None = None
    symmetric: bool = False


RowsOf = Callable[[int, int], Grid]
_Arrays = Mapping[str, Array]


def decoding_of(config: Mapping[str, Any]) -> Decoding:
    """What a quantization_config says about codes beside their layout."""
    block = config.get("weight_block_size")
    pair = None
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(b, int) and b > 0 for b in block)
    ):
        pair = (block[0], block[1])
    symmetric = config.get("sym") is True or config.get("zero_point") is False
    return Decoding(config.get("checkpoint_format") != "gptq_v2", pair, symmetric)


def refusal(matrix: Stored, decoding: Decoding, *, stacks: bool = False) -> str:
    """Why a matrix can't be decoded, or "". With `stacks`, those of a stack are meant one by one."""
    leaves, scheme = matrix.leaves, matrix.scheme
    if matrix.layout is Layout.DENSE:
        dtypes = {tensor.dtype for tensor in leaves.values()}
        return "" if dtypes <= FLOATS else f"its dtype ({', '.join(dtypes)}) can't be decoded"
    whole = matrix.layout is Layout.STACKED and not stacks
    if matrix.layout not in _DECODERS or scheme is None or whole:
        return f"its layout ({matrix.layout}) can't be decoded"
    if "weight_g_idx" in leaves:
        return "its activation order (weight_g_idx) can't be decoded"
    if matrix.layout in (Layout.PACKED, Layout.AWQ, Layout.GPTQ) and scheme.bits not in (2, 4, 8):
        return f"integers of {scheme.bits} bits can't be decoded"
    if matrix.layout is Layout.AWQ and scheme.bits != 4:
        return f"AWQ of {scheme.bits} bits can't be decoded"
    if matrix.layout in (Layout.AWQ, Layout.GPTQ) and not (
        "qzeros" in leaves or decoding.symmetric
    ):
        return "its zero points (qzeros) aren't there"
    if matrix.layout is Layout.CODES and leaves["weight"].dtype == "U8":
        return "unsigned codes of one byte can't be decoded"
    return next(_misfits(matrix, decoding), "")


def _misfits(matrix: Stored, decoding: Decoding) -> Iterator[str]:
    """Tensors whose shapes don't make up the matrix."""
    for leaf, shapes in _wanted(matrix, decoding).items():
        tensor = matrix.leaves.get(leaf)
        if tensor is not None and tensor.shape not in shapes:
            yield f"{leaf} has shape {list(tensor.shape)} instead of {list(shapes[-1])}"


def _wanted(matrix: Stored, decoding: Decoding) -> dict[str, list[tuple[int, ...]]]:
    """Leaf -> shapes that it may have."""
    (out, columns), scheme = matrix.shape, _scheme(matrix)
    groups = _groups(matrix)
    words, rows = -(-columns * scheme.bits // 32), -(-out * scheme.bits // 32)
    match matrix.layout:
        case Layout.PACKED:
            return {
                "weight_packed": [(out, words)],
                "weight_scale": [(out, groups)],
                "weight_zero_point": [(rows, groups)],
            }
        case Layout.AWQ:
            return {
                "qweight": [(columns, rows)],
                "qzeros": [(groups, rows)],
                "scales": [(groups, out)],
            }
        case Layout.GPTQ:
            return {
                "qweight": [(words, out)],
                "qzeros": [(groups, rows)],
                "scales": [(groups, out)],
                "g_idx": [(columns,)],
            }
        case Layout.CODES if scheme.block_rows > 1:
            down, across = decoding.block or (scheme.block_rows, scheme.group_size)
            blocks = (-(-out // down), -(-columns // across))
            return {"weight_scale": [blocks], "weight_scale_inv": [blocks]}
        case Layout.CODES:
            shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (out,), (out, groups)]
            return dict.fromkeys(("weight_scale", "weight_scale_inv", "weight_zero_point"), shapes)
        case _:
            found: dict[str, list[tuple[int, ...]]] = {"weight_scale": [(out, groups)]}
            return found | {leaf: [(), (1,)] for leaf in _GLOBAL_SCALES}


def _groups(matrix: Stored) -> int:
    """Groups of columns, if they are whole ones; otherwise 0."""
    (_, columns), scheme = matrix.shape, _scheme(matrix)
    size = scheme.group_size or columns
    return 0 if not size or columns % size else columns // size


def decoded(directory: Path, matrix: Stored, decoding: Decoding) -> Iterator[Rows]:
    """Chunks of rows (rows, in) as float32, from the first row to the last.

    Raises `InputError` for a file that can't be read.
    """
    out, columns = matrix.shape
    rows_of = reader(directory, matrix, decoding)
    step = max(1, CHUNK_WEIGHTS // max(1, columns) // ROW_MULTIPLE) * ROW_MULTIPLE
    for start in range(0, out, step):
        yield rows_of(start, min(start + step, out)).values


def reader(directory: Path, matrix: Stored, decoding: Decoding, entry: int = 0) -> RowsOf:
    """What decodes rows from a multiple of `ROW_MULTIPLE` on, of entry `entry` of a stack.

    `refusal` must have been asked. Raises `InputError` for a file that can't be read.
    """
    arrays = {leaf: opened(directory, tensor) for leaf, tensor in matrix.leaves.items()}
    if matrix.layout is Layout.STACKED or "" in arrays:
        arrays = {leaf: array[entry] for leaf, array in arrays.items()}
    return _DECODERS[matrix.layout](matrix, arrays, decoding)


def _dense(matrix: Stored, arrays: _Arrays, decoding: Decoding) -> RowsOf:
    ((leaf, array),) = arrays.items()
    dtype = matrix.leaves[leaf].dtype
    rows = array.reshape(matrix.shape)
    return lambda start, stop: dense(rows[start:stop], dtype)


def dense(rows: Array, dtype: str) -> Grid:
    """Unquantized rows (rows, in)."""
    numbers = _room(*rows.shape)
    if dtype == "BF16":
        np.left_shift(rows, 16, out=numbers.view(np.uint32), dtype=np.uint32)
    elif dtype == "F16":
        _kernels().widen_halves(rows.view(np.uint16), numbers)
    else:
        np.copyto(numbers, rows, "same_kind")
    return Grid(numbers, _ONE, _NONE, _even(rows.shape[1], 1), floating(dtype))


def _packed(matrix: Stored, arrays: _Arrays, decoding: Decoding) -> RowsOf:
    """Codes along a row, the first in the lowest bits; zero points down a column."""
    scheme, (_, columns) = _scheme(matrix), matrix.shape
    bits = scheme.bits
    codes, zeros = arrays["weight_packed"], arrays.get("weight_zero_point")
    scales, dtype = arrays["weight_scale"], matrix.leaves["weight_scale"].dtype
    table, runs = np.arange(1 << bits, dtype=np.float32), _even(columns, scales.shape[1])

    def rows(start: int, stop: int) -> Grid:
        points = np.full((1, 1), 1 << (bits - 1), np.float32)
        if zeros is not None:
            per = 32 // bits
            words = zeros[start // per : -(-stop // per)]
            points = _unpacked(words, bits, 0)[: stop - start].astype(np.float32)
        numbers = _looked_up(codes[start:stop], bits, table, columns)
        factors = floats(scales[start:stop], dtype)
        return Grid(numbers, factors, points, runs, integers(0, (1 << bits) - 1))

    return rows


def _awq(matrix: Stored, arrays: _Arrays, decoding: Decoding) -> RowsOf:
    """Eight outputs in a word, in the "gemm" order."""
    _, columns = matrix.shape
    runs = _even(columns, len(arrays["scales"]))

    def nibbles(words: Array, start: int, stop: int, numbers: Rows) -> Rows:
        _kernels().unpack_outputs(
            _words(words)[:, start // 8 : -(-stop // 8)], _AWQ_PLACES, 15, numbers
        )
        return numbers

    def rows(start: int, stop: int) -> Grid:
        scales = floats(arrays["scales"][:, start:stop], matrix.leaves["scales"].dtype)
        scales = np.ascontiguousarray(scales.T)
        zeros = arrays.get("qzeros")
        points = np.full(scales.shape, 8, np.float32)
        if zeros is not None:
            points = nibbles(zeros, start, stop, points)
        numbers = nibbles(arrays["qweight"], start, stop, _room(stop - start, columns))
        return Grid(numbers, scales, points, runs, integers(0, 15))

    return rows


def _gptq(matrix: Stored, arrays: _Arrays, decoding: Decoding) -> RowsOf:
    """Codes down a column; zero points along outputs; any group for any input.

    Zero points of v1 are one less than what they stand for, and the highest of them wraps.
    """
    bits, (_, columns) = _scheme(matrix).bits, matrix.shape
    per, mask = 32 // bits, (1 << bits) - 1
    scales, zeros, order = arrays["scales"], arrays.get("qzeros"), arrays.get("g_idx")
    groups = np.arange(columns) // max(1, columns // len(scales))
    if order is not None:
        groups = np.array(order, np.int64)
    if len(groups) and not 0 <= groups.min() <= groups.max() < len(scales):
        raise InputError(
            f"{matrix.name}.g_idx has group {groups.max()}, and there are {len(scales)}; fetch it again."
        )
    runs = runs_of(groups)

    def rows(start: int, stop: int) -> Grid:
        points = np.full((1, 1), 1 << (bits - 1), np.float32)
        if zeros is not None:
            words = zeros[:, start // per : -(-stop // per)]
            codes = _unpacked(words, bits, 1)[:, : stop - start]
            if decoding.zeros_less_one:
                codes = (codes + np.uint32(1)) & np.uint32(mask)
            points = np.ascontiguousarray(codes.T, np.float32)
        numbers = _room(stop - start, columns)
        _kernels().unpack_inputs(_words(arrays["qweight"])[:, start:stop], bits, numbers)
        factors = floats(scales[:, start:stop], matrix.leaves["scales"].dtype)
        factors = np.ascontiguousarray(factors.T)
        return Grid(numbers, factors, points, runs, integers(0, mask))

    return rows


def _codes(matrix: Stored, arrays: _Arrays, decoding: Decoding) -> RowsOf:
    """One byte for a weight; scales of a matrix, of rows, of groups of a row, or of blocks."""
    out, columns = matrix.shape
    weight, scheme = matrix.leaves["weight"], _scheme(matrix)
    signed = weight.dtype == "I8"
    table = (
        np.arange(256).astype(np.int8).astype(np.float32) if signed else EIGHT_BITS[weight.dtype]
    )
    spacing = integers(-128, 127) if signed else floating(weight.dtype)
    leaf = "weight_scale_inv" if "weight_scale_inv" in arrays else "weight_scale"
    scales = floats(arrays[leaf], matrix.leaves[leaf].dtype)
    zeros = arrays.get("weight_zero_point")
    down, across = decoding.block or (scheme.block_rows, scheme.group_size or columns)
    if scales.size == 1 or scheme.block_rows == 1:
        scales = np.broadcast_to(scales.reshape(-1, 1), (out, 1)) if scales.size == 1 else scales
        scales = scales.reshape(out, -1)
        down, across = 1, columns // scales.shape[1]
    runs = runs_of(np.arange(columns) // max(1, across))

    def rows(start: int, stop: int) -> Grid:
        numbers = _looked_up(arrays["weight"][start:stop], 8, table, columns)
        zero = _NONE
        if zeros is not None:
            points = np.asarray(zeros).astype(np.float32)
            points = points.reshape(-1, 1) if points.size in (1, out) else points
            zero = points if points.size == 1 else points[start:stop]
        return Grid(numbers, scales[np.arange(start, stop) // down], zero, runs, spacing)

    return rows


def _half_bytes(matrix: Stored, arrays: _Arrays, decoding: Decoding) -> RowsOf:
    """Two codes of two's complement in a byte, the even column in the lower half."""
    (_, columns), scales = matrix.shape, arrays["weight_scale_inv"]
    dtype, runs = matrix.leaves["weight_scale_inv"].dtype, _even(columns, scales.shape[1])
    table = np.array((*range(8), *range(-8, 0)), np.float32)

    def rows(start: int, stop: int) -> Grid:
        numbers = _looked_up(arrays["weight"][start:stop], 4, table, columns)
        return Grid(numbers, floats(scales[start:stop], dtype), _NONE, runs, integers(-8, 7))

    return rows


def _nvfp4(matrix: Stored, arrays: _Arrays, decoding: Decoding) -> RowsOf:
    """E2M1 codes, an E4M3 scale for each 16 of them, and one float32 scale of all.

    Compressed-tensors divides by that, ModelOpt multiplies with it.
    """
    (_, columns), scales = matrix.shape, arrays["weight_scale"]
    dtype, runs = matrix.leaves["weight_scale"].dtype, _even(columns, scales.shape[1])
    codes = arrays["weight" if matrix.layout is Layout.MODELOPT else "weight_packed"]
    divisor, factor = (
        np.asarray(arrays.get(leaf, _ONE), np.float32).reshape(-1)[0] for leaf in _GLOBAL_SCALES
    )

    def rows(start: int, stop: int) -> Grid:
        numbers = _looked_up(codes[start:stop], 4, E2M1, columns)
        factors = floats(scales[start:stop], dtype) / divisor * factor
        return Grid(numbers, factors, _NONE, runs, E2M1_SPACING)

    return rows


def _mxfp4(matrix: Stored, arrays: _Arrays, decoding: Decoding) -> RowsOf:
    """E2M1 codes and a power of two for each 32 of them."""
    _, columns = matrix.shape
    stacked = "blocks" in arrays
    codes = arrays["blocks"] if stacked else arrays["weight_packed"]
    scales = arrays["scales"] if stacked else arrays["weight_scale"]
    codes, runs = codes.reshape(len(codes), -1), _even(columns, scales.shape[1])

    def rows(start: int, stop: int) -> Grid:
        numbers = _looked_up(codes[start:stop], 4, E2M1, columns)
        factors = exponents(np.asarray(scales[start:stop]).view(np.uint8))
        return Grid(numbers, factors, _NONE, runs, E2M1_SPACING)

    return rows


_DECODERS: dict[Layout, Callable[[Stored, _Arrays, Decoding], RowsOf]] = {
    Layout.DENSE: _dense,
    Layout.PACKED: _packed,
    Layout.AWQ: _awq,
    Layout.GPTQ: _gptq,
    Layout.CODES: _codes,
    Layout.HALF_BYTES: _half_bytes,
    Layout.NVFP4: _nvfp4,
    Layout.MODELOPT: _nvfp4,
    Layout.MXFP4: _mxfp4,
    Layout.STACKED: _mxfp4,
}


def _scheme(matrix: Stored) -> Scheme:
    if matrix.scheme is None:  # `refusal` comes first
        raise ValueError(matrix.name)
    return matrix.scheme


def _kernels() -> Any:
    """The compiled loops; importing numba takes a while, and most of what imports this doesn't decode."""
    from gguf2st.verification import kernels  # noqa: PLC0415

    return kernels


def _room(rows: int, columns: int) -> Rows:
    return _buffers.take("numbers", (rows, columns), np.float32)


def _looked_up(codes: Array, bits: int, table: Rows, columns: int) -> Rows:
    """Numbers (rows, columns) of a table whose codes lie along rows, the first in the lowest bits."""
    numbers = _room(len(codes), columns)
    _kernels().unpack(np.asarray(codes).view(np.uint8), bits, table, numbers)
    return numbers


def _words(array: Array) -> npt.NDArray[np.uint32]:
    return np.asarray(array).view(np.uint32)


@lru_cache(256)
def _even(columns: int, groups: int) -> Runs:
    """Groups of equally many columns."""
    return runs_of(np.arange(columns) // max(1, columns // max(1, groups)))


def _unpacked(words: Array, bits: int, axis: int) -> npt.NDArray[np.uint32]:
    """The codes of 32-bit words, the lowest bits first, in place of the words of an axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    codes = (np.expand_dims(unsigned, -1) >> shifts) & np.uint32((1 << bits) - 1)
    codes = np.moveaxis(codes, -1, axis + 1)
    shape = [*words.shape]
    shape[axis] *= len(shifts)
    return codes.reshape(shape)
