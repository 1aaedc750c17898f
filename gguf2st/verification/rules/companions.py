"""What lies beside the codes of each format, with which dtype and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gguf2st.scheme import Scheme
from gguf2st.verification.context import Context
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy
from gguf2st.verification.stored import FLOATS, FP8, Layout, Stored


def mistakes(context: Context) -> Iterator[Finding]:
    """Findings about matrices whose tensors don't make up what their layout needs."""
    grouped: dict[str, list[Stored]] = {}
    for matrix in context.quantized.values():
        for reason in _of(matrix, context):
            grouped.setdefault(reason, []).append(matrix)
    for reason, matrices in grouped.items():
        modules = tuple(matrix.name for matrix in matrices)
        drafter = all(name.startswith("mtp.") for name in modules)
        for engine in context.engines:
            effect = _effect(reason, engine)
            yield Finding(
                "D-13",
                engine,
                Effect.RISK if drafter else effect,
                modules,
                reason,
                Remedy("write the matrices again from the original", Mend.MISSING, modules),
            )


NO_SHAPE = "weight_shape isn't there"
G_IDX = "weight_g_idx is there: an activation order, which no engine reads any more"
_SURPLUS = ("weight_zero_point is there", "weight_g_idx is there")
_ABSENT = ("isn't there", "aren't there", "without a scale", "no whole set")


def _effect(reason: str, engine: str) -> Effect:
    """vLLM raises for what it has no parameter for, none for what stays unfilled; sizes must fit."""
    if reason == NO_SHAPE:
        # vLLM and SGLang don't use what they load as weight_shape.
        return Effect.WRONG if engine == "hf" else Effect.NOTE
    if reason.startswith(_SURPLUS):
        return Effect.CRASH if engine == "vllm" else Effect.WRONG
    return Effect.WRONG if any(text in reason for text in _ABSENT) else Effect.CRASH


def _of(matrix: Stored, context: Context) -> Iterator[str]:
    checks: dict[Layout, Callable[[Stored], Iterator[str]]] = {
        Layout.BROKEN: _broken,
        Layout.PACKED: _packed,
        Layout.AWQ: _awq,
        Layout.GPTQ: _gptq,
        Layout.CODES: _codes,
    }
    if matrix.layout in checks:
        yield from checks[matrix.layout](matrix)
    if matrix.layout is Layout.PACKED and context.view.method == "compressed-tensors":
        symmetric = {scheme.symmetric for scheme in context.schemes if scheme.kind == "int"}
        has_zeros = "weight_zero_point" in matrix.leaves
        if symmetric == {True} and has_zeros:
            yield "weight_zero_point is there, and the config says symmetric"
        if symmetric == {False} and not has_zeros:
            yield "weight_zero_point isn't there, and the config says it isn't symmetric"


def _broken(matrix: Stored) -> Iterator[str]:
    leaves = sorted(leaf for leaf in matrix.leaves if leaf)
    if leaves == ["weight"]:
        yield f"codes of dtype {matrix.leaves['weight'].dtype} without a scale"
    else:
        yield f"only {', '.join(leaves)}: no whole set of any format"


def _packed(matrix: Stored) -> Iterator[str]:
    leaves, (out, columns), scheme = matrix.leaves, matrix.shape, matrix.scheme
    if scheme is None:
        return
    codes, scale = leaves["weight_packed"], leaves["weight_scale"]
    if codes.dtype != "I32":
        yield f"weight_packed is {codes.dtype} instead of I32"
    if scheme.bits and codes.shape != (out, -(-columns * scheme.bits // 32)):
        yield f"weight_packed has {codes.shape[1]} words for {columns} columns"
    if scale.dtype not in FLOATS:
        yield f"weight_scale is {scale.dtype} instead of a float"
    if scale.shape[0] != out or columns % scale.shape[1]:
        yield f"weight_scale has shape {list(scale.shape)} for {out} rows and {columns} columns"
    shape = leaves.get("weight_shape")
    if shape is None:
        yield NO_SHAPE
    elif (shape.dtype, shape.shape) not in (("I64", (2,)), ("I32", (2,))):
        yield f"weight_shape is {shape.dtype} of shape {list(shape.shape)} instead of two integers"
    zeros = leaves.get("weight_zero_point")
    if zeros is not None:
        wanted = (-(-out * scheme.bits // 32), scale.shape[1])
        if zeros.dtype != "I32" or zeros.shape != wanted:
            yield (
                f"weight_zero_point is {zeros.dtype} of shape {list(zeros.shape)} instead of I32 of "
                f"{list(wanted)}"
            )
    if "weight_g_idx" in leaves:
        yield G_IDX


def _awq(matrix: Stored) -> Iterator[str]:
    leaves, (_out, columns) = matrix.leaves, matrix.shape
    codes, scales, zeros = leaves["qweight"], leaves["scales"], leaves.get("qzeros")
    if codes.dtype != "I32":
        yield f"qweight is {codes.dtype} instead of I32"
    if scales.dtype not in FLOATS:
        yield f"scales are {scales.dtype} instead of floats"
    if columns % max(1, scales.shape[0]):
        yield f"scales have {scales.shape[0]} groups for {columns} columns"
    # D-31 speaks of missing ones.
    if zeros is not None and (zeros.dtype, zeros.shape) != (
        "I32",
        (scales.shape[0], codes.shape[1]),
    ):
        yield f"qzeros are {zeros.dtype} of shape {list(zeros.shape)}, and scales {list(scales.shape)}"


def _gptq(matrix: Stored) -> Iterator[str]:
    leaves, (out, columns), scheme = matrix.leaves, matrix.shape, matrix.scheme
    scales, zeros, order = leaves["scales"], leaves.get("qzeros"), leaves.get("g_idx")
    bits = scheme.bits if scheme is not None else 4
    if leaves["qweight"].dtype != "I32":
        yield f"qweight is {leaves['qweight'].dtype} instead of I32"
    if scales.dtype not in FLOATS or columns % max(1, scales.shape[0]):
        yield f"scales are {scales.dtype} of shape {list(scales.shape)} for {columns} columns"
    if zeros is None:
        yield "qzeros aren't there"
    elif zeros.shape != (scales.shape[0], out * bits // 32):
        yield f"qzeros have shape {list(zeros.shape)}, and scales {list(scales.shape)}"
    if order is not None and order.shape != (columns,):
        yield f"g_idx has shape {list(order.shape)} for {columns} columns"


def _codes(matrix: Stored) -> Iterator[str]:
    leaves, (out, columns), scheme = matrix.leaves, matrix.shape, matrix.scheme
    scale = leaves.get("weight_scale_inv", leaves.get("weight_scale"))
    if scale is None or scheme is None:
        return
    if (
        scale.dtype not in FLOATS
        and scale.dtype not in FP8
        and scale.dtype not in ("U8", "F8_E8M0")
    ):
        yield f"the scale is {scale.dtype} instead of a float"
    if not _scale_fits(scale.shape, out, columns, scheme):
        yield f"the scale has shape {list(scale.shape)} for {out} rows and {columns} columns"


def _scale_fits(shape: tuple[int, ...], out: int, columns: int, scheme: Scheme) -> bool:
    if scheme.block_rows > 1:
        return len(shape) == 2 and shape[0] <= out and shape[1] <= columns
    if shape in ((), (1,), (1, 1), (out,), (out, 1)):
        return True
    return len(shape) == 2 and shape[0] == out and columns % shape[1] == 0
