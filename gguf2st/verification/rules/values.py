"""Rules that read values, which are asked for with `deep`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from gguf2st.engines.base import Kind
from gguf2st.verification.context import Context
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy, rule
from gguf2st.verification.header import Tensor
from gguf2st.verification.stored import Layout

if TYPE_CHECKING:
    from gguf2st.verification.reading import Summary

_AGAIN = Remedy("convert or quantize the original again", Mend.MISSING)
# Classes whose norms multiply with 1 + weight (transformers' modeling_qwen3_next.py,
# modeling_qwen3_5.py, modeling_gemma2.py, modeling_gemma3.py).
_ZERO_CENTERED = ("Qwen3_5", "Qwen3Next")
# The matrix of an expert that is joined with no other
_SECOND_OF_EXPERT = ("down_proj", "w2")
_SCALES = (
    "weight_scale",
    "weight_scale_inv",
    "scales",
    "weight_global_scale",
    "weight_scale_2",
    "input_scale",
)


def _summary(context: Context, tensor: Tensor) -> Summary:
    from gguf2st.verification.reading import summarize  # noqa: PLC0415  # numpy, only when asked for

    known: dict[str, Summary] = context.answers.setdefault("summaries", {})
    if tensor.name not in known:
        known[tensor.name] = summarize(context.view.directory, tensor)
    return known[tensor.name]


def _floats(context: Context) -> Iterator[Tensor]:
    from gguf2st.verification.reading import FLOATING  # noqa: PLC0415

    if not context.view.headers_only:
        for tensor in context.view.tensors.values():
            if tensor.dtype in FLOATING:
                yield tensor


@rule("D-41", "value heads of delta nets lie by key head", against=True)
def value_heads(context: Context) -> Iterator[Finding]:
    """Value heads of gated delta nets lie in the model's order, by key head, in all of its tensors.

    Nothing but a comparison can tell: see `verification.against.heads`. Source: transformers'
    modeling_qwen3_5.py and modeling_qwen3_next.py (`repeat_interleave` of keys); llama.cpp's
    conversion/qwen.py tiles the heads of Qwen3.5.
    """
    yield from ()


@rule("V-01", "values are finite", deep=True)
def finite(context: Context) -> Iterator[Finding]:
    """No weight and no scale is NaN or infinite.

    Source: arithmetic; one such value spreads to every output.
    """
    broken = {t.name: s.broken for t in _floats(context) if (s := _summary(context, t)).broken}
    if broken:
        first = next(iter(broken))
        yield Finding(
            "V-01",
            "",
            Effect.WRONG,
            tuple(broken),
            f"NaN or infinite values, {broken[first]:,} in the first",
            _AGAIN,
        )


@rule("V-02", "scales aren't all zero, nor negative where they can't be", deep=True)
def scales(context: Context) -> Iterator[Finding]:
    """A matrix whose scales are all zero is zero; NVFP4's and activations' scales are positive.

    Source: compressed_tensors/compressors/nvfp4; integers may have negative scales, which
    re-expressed GGUF blocks make use of.
    """
    zero, negative = [], []
    for tensor in _floats(context):
        module, _, leaf = tensor.name.rpartition(".")
        matrix = context.stored.get(module)
        if leaf not in _SCALES or matrix is None or not matrix.quantized:
            continue
        summary = _summary(context, tensor)
        if summary.count and summary.zeros == summary.count:
            zero.append(tensor.name)
        unsigned = matrix.layout in (Layout.NVFP4, Layout.MODELOPT) or leaf in _SCALES[3:]
        if unsigned and summary.negative:
            negative.append(tensor.name)
    if zero:
        yield Finding("V-02", "", Effect.WRONG, tuple(zero), "all scales are zero", _AGAIN)
    if negative:
        yield Finding("V-02", "", Effect.WRONG, tuple(negative), "negative scales", _AGAIN)


# Codes at the ends of their range: one of 32 or 128 in a group is, of few values some more.
_MOST_AT_ENDS = {4: 0.6, 8: 0.3}


@rule("V-03", "codes aren't saturated", deep=True)
def saturated(context: Context) -> Iterator[Finding]:
    """Most codes don't lie at the ends of their range, as they do with scales that are too small.

    Source: each group's largest weight alone belongs there.
    """
    from gguf2st.verification.reading import ends_of_range  # noqa: PLC0415

    found: dict[str, float] = {}
    for name, matrix in context.quantized.items():
        codes = matrix.leaves.get("weight_packed", matrix.leaves.get("qweight"))
        bits = matrix.scheme.bits if matrix.scheme is not None else 0
        whole = matrix.layout in (Layout.PACKED, Layout.AWQ, Layout.GPTQ)
        if codes is None or bits not in _MOST_AT_ENDS or not whole or context.view.headers_only:
            continue
        share = ends_of_range(context.view.directory, codes, bits)
        if share > _MOST_AT_ENDS[bits]:
            found[name] = share
    if found:
        first = next(iter(found))
        yield Finding(
            "V-03",
            "",
            Effect.RISK,
            tuple(found),
            f"{found[first]:.0%} of the codes lie at the ends of their range: scales are too small",
            _AGAIN,
        )


@rule("D-14", "global scales of NVFP4", ("vllm", "sglang"), deep=True)
def global_scales(context: Context) -> Iterator[Finding]:
    """Matrices that an engine joins have one global scale: it keeps the largest for all.

    Of experts, gate and up of each are joined. Source: vLLM's compressed_tensors_w4a4_nvfp4.py
    (keeps the largest) and compressed_tensors_moe_w4a4_nvfp4.py (takes the gate's), which warn.
    """
    for engine in context.engines:
        apart: dict[str, None] = {}
        for reading in context.layers(engine):
            experts = reading.module.kind is Kind.EXPERTS
            values: dict[str, set[float]] = {}
            for matrix in reading.stored:
                scale = matrix.leaves.get(
                    "weight_global_scale", matrix.leaves.get("weight_scale_2")
                )
                if scale is None or engine == "hf" or context.view.headers_only:
                    continue
                path, _, part = matrix.name.rpartition(".")
                alone = matrix.name if part in _SECOND_OF_EXPERT else path
                joined = values.setdefault(alone if experts else "", set())
                joined.add(_summary(context, scale).most)
            if any(len(found) > 1 for found in values.values()):
                apart.update(dict.fromkeys(reading.module.shards))
        if apart:
            yield Finding(
                "D-14",
                engine,
                Effect.RISK,
                tuple(apart),
                "the global scale differs within a layer that the engine joins, which keeps one",
                Remedy("quantize the layer with one global scale", Mend.DEQUANTIZE, tuple(apart)),
            )


@rule("V-04", "a tied head is the embedding", deep=True)
def tied_head(context: Context) -> Iterator[Finding]:
    """With tie_word_embeddings an output head that is there all the same equals the embedding.

    Source: vLLM's config/model.py unties itself then, transformers and SGLang don't.
    """
    expected = context.expected
    if expected is None or not expected.tied or context.view.headers_only:
        return
    head = next((n for n in expected.parameters if n.endswith("lm_head.weight")), "")
    tensors = context.canonical_tensors
    one, other = tensors.get(head), tensors.get(f"{expected.prefix}embed_tokens.weight")
    if one is not None and other is not None and not _equal(context, one, other):
        yield Finding(
            "V-04",
            "",
            Effect.WRONG,
            (one.name,),
            "differs from the embedding, and tie_word_embeddings is true",
            Remedy(
                "set tie_word_embeddings to false",
                Mend.CONFIG,
                values={"tie_word_embeddings": False},
            ),
        )


def _equal(context: Context, one: Tensor, other: Tensor) -> bool:
    from gguf2st.verification.reading import float_chunks  # noqa: PLC0415

    if one.shape != other.shape:
        return False
    directory = context.view.directory
    if one.dtype != other.dtype:
        return True  # chunks differ in length; a cast copy is no mistake
    pairs = zip(float_chunks(directory, one), float_chunks(directory, other), strict=True)
    return all(bool((a == b).all()) for a, b in pairs)


@rule("D-42", "norms and decays of the right kind", deep=True)
def shifted(context: Context) -> Iterator[Finding]:
    """Norms that multiply with 1 + weight have weights around 0, others around 1; A_log is a logarithm.

    Source: Qwen3_5RMSNorm and Qwen3_5RMSNormGated in transformers' modeling_qwen3_5.py;
    llama.cpp's converter adds the 1 and stores -exp(A_log).
    """
    if not context.view.model_class.startswith(_ZERO_CENTERED):
        return
    norms: list[Tensor] = []
    decays: list[Tensor] = []
    gated: list[Tensor] = []
    for tensor in _floats(context):
        if len(tensor.shape) != 1:
            continue
        if tensor.name.endswith(".linear_attn.norm.weight"):
            gated.append(tensor)
        elif tensor.name.endswith(("norm.weight", "embedding.weight", "hidden.weight")):
            norms.append(tensor)
        elif tensor.name.endswith(".A_log"):
            decays.append(tensor)
    norms = [tensor for tensor in norms if "visual" not in tensor.name]
    yield from _off(context, norms, 0.0, "around 1 where 1 is added: the 1 is there twice")
    yield from _off(context, gated, 1.0, "far from 1 where nothing is added")
    raw = [t.name for t in decays if _decay(_summary(context, t))]
    if raw:
        yield Finding(
            "D-42",
            "",
            Effect.WRONG,
            tuple(raw),
            "all values are negative and reach below -8, as -exp(A_log) does; a logarithm is meant",
            Remedy("take log(-value)", Mend.MISSING),
        )


def _off(
    context: Context, tensors: Sequence[Tensor], centre: float, what: str
) -> Iterator[Finding]:
    means = {tensor.name: _summary(context, tensor).mean for tensor in tensors}
    if means and abs(median(means.values()) - centre) > 0.7:
        yield Finding(
            "D-42",
            "",
            Effect.RISK,
            tuple(means),
            f"the weights' mean is {median(means.values()):.2f}, {what}",
            Remedy("compare with the original, and shift them by 1", Mend.MISSING),
        )


def _decay(summary: Summary) -> bool:
    return summary.count > 0 and ((summary.most < 0 and summary.least < -8) or summary.most > 20)
