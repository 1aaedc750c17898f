"""Rules about kernels: which matrices they take, on how many ranks, on which cards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gguf2st.engines import stacked
from gguf2st.engines.base import Cause, Kind, Verdict
from gguf2st.engines.sglang.kernels import EXPERTS_WITH_ZEROS
from gguf2st.scheme import Scheme
from gguf2st.verification.context import Context, LayerReading
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy, rule
from gguf2st.verification.stored import Layout

_DEQUANTIZE = "dequantize the modules and list them as exceptions"
_SERVING = ("vllm", "sglang")


@dataclass(frozen=True)
class _Judged:
    reading: LayerReading
    scheme: Scheme
    verdict: Verdict


def _judged(context: Context, engine: str) -> list[_Judged]:
    """All quantized layers that the engine takes for what they are, with its kernels' verdicts."""
    known: dict[str, list[_Judged]] = context.answers.setdefault("verdicts", {})
    if engine in known:
        return known[engine]
    found = known[engine] = []
    shapes, text = context.shapes, context.view.text_config
    for reading in context.layers(engine):
        scheme = reading.outcome.scheme or (reading.stored[0].scheme if reading.stored else None)
        whole = len(reading.quantized) == len(reading.stored)
        broken = any(matrix.layout is Layout.BROKEN for matrix in reading.stored)
        if scheme is None or not whole or broken or reading.module.unquantized:
            continue
        matrix = stacked(reading.module, shapes, text)
        verdict = context.engines[engine].verdict(
            matrix, context.view.method, scheme, context.deployment
        )
        found.append(_Judged(reading, scheme, verdict))
    return found


def _refused(context: Context, identity: str, causes: tuple[Cause, ...]) -> Iterator[Finding]:
    """One finding for each engine and reason."""
    for engine in context.engines:
        grouped: dict[tuple[str, Effect], list[str]] = {}
        for judged in _judged(context, engine):
            if judged.reading.module.kind is Kind.EXPERTS:
                continue
            cause = judged.verdict.cause
            if judged.verdict.refusal and cause in causes:
                drafter = judged.reading.module.drafter
                key = (judged.verdict.refusal, Effect.RISK if drafter else Effect.CRASH)
                grouped.setdefault(key, []).extend(judged.reading.module.shards)
        for (reason, effect), modules in grouped.items():
            yield Finding(
                identity,
                engine,
                effect,
                tuple(modules),
                reason,
                Remedy(_DEQUANTIZE, Mend.DEQUANTIZE, tuple(modules)),
                _message(engine, reason),
            )


def _message(engine: str, reason: str) -> str:
    if engine == "sglang" and "tiles" in reason:
        return f"size_n = {reason.split(maxsplit=1)[0]} is not divisible by tile_n_size = 64"
    return f"ValueError: {reason}" if engine != "hf" else ""


@rule("D-09", "matrices fill the kernels' tiles", _SERVING)
def tiles(context: Context) -> Iterator[Finding]:
    """Stacked rows per rank are whole 64, columns whole 128 (or 128 and 64); vLLM pads them.

    Source: SGLang's gptq_marlin_repack.cuh and compressed_tensors_wNa16.py, which has no way
    round; vLLM's marlin_utils.py (padding since 2026, a crash before) and fp8_utils.py.
    """
    causes = (Cause.TILES,) if context.deployment.cpu else (Cause.TILES, Cause.KERNEL)
    yield from _refused(context, "D-09", causes)
    for engine in context.engines:
        slow: dict[str, list[str]] = {}
        for judged in _judged(context, engine):
            experts = judged.reading.module.kind is Kind.EXPERTS
            if not (experts or judged.verdict.refusal or judged.reading.module.drafter):
                for note in judged.verdict.notes:
                    slow.setdefault(note, []).extend(judged.reading.module.shards)
        for note, modules in slow.items():
            yield Finding(
                "D-09",
                engine,
                Effect.SLOWER,
                tuple(modules),
                note,
                Remedy("", modules=tuple(modules)),
            )


@rule("D-10", "groups lie within a rank", _SERVING)
def groups(context: Context) -> Iterator[Finding]:
    """A rank's columns of row-parallel layers (o_proj, out_proj, down_proj) are whole groups.

    Source: vLLM's verify_group_size_divides_partition, SGLang's compressed_tensors_wNa16.py.
    """
    yield from _refused(context, "D-10", (Cause.GROUPS,))


@rule("D-11", "words lie within a rank", _SERVING)
def words(context: Context) -> Iterator[Finding]:
    """Where a word holds codes or zero points of several rows, a rank has whole words.

    Source: auto_awq.py of vLLM, awq.py of SGLang; packed zero points of compressed-tensors.
    """
    yield from _refused(context, "D-11", (Cause.WORDS,))


@rule("D-12", "group sizes that kernels have", _SERVING)
def group_sizes(context: Context) -> Iterator[Finding]:
    """32, 64, 128, or one scale for a row.

    Source: MARLIN_SUPPORTED_GROUP_SIZES in marlin_utils.py of both engines; vLLM's further
    kernels in kernels/linear/mixed_precision.
    """
    yield from _refused(context, "D-12", (Cause.GROUP_SIZE,))


@rule("D-15", "what CPUs take", ("vllm",))
def on_cpu(context: Context) -> Iterator[Finding]:
    """vLLM's build for CPUs has integers of 4 bits, with 32 rows and columns at a time.

    Source: vLLM's kernels/linear/mixed_precision/cpu.py. Asked for with `cpu` alone.
    """
    if context.deployment.cpu:
        yield from _refused(context, "D-15", (Cause.KERNEL,))


@rule("D-16", "experts suit the kernels", _SERVING)
def experts(context: Context) -> Iterator[Finding]:
    """Hidden and inner sizes of experts, per rank, are whole groups and tiles.

    Source: vLLM's compressed_tensors_moe_wna16.py and marlin_utils.py, SGLang's
    marlin_utils.py check_moe_marlin_supports_layer.
    """
    for engine in context.engines:
        for judged in _judged(context, engine):
            module, verdict = judged.reading.module, judged.verdict
            if module.kind is not Kind.EXPERTS or not (verdict.refusal or verdict.notes):
                continue
            # What transformers makes of experts is a matter of schemes, not of shapes.
            effect = Effect.CRASH if verdict.refusal else Effect.SLOWER
            if engine == "hf":
                continue
            yield Finding(
                "D-16",
                engine,
                Effect.RISK if module.drafter else effect,
                module.shards,
                verdict.refusal or "; ".join(verdict.notes),
                Remedy(_DEQUANTIZE, Mend.DEQUANTIZE, module.shards)
                if verdict.refusal
                else Remedy("nothing needs to be done"),
                _message(engine, verdict.refusal) if verdict.refusal else "",
            )


@rule("D-18", "what an engine and a card can do")
def capability(context: Context) -> Iterator[Finding]:
    """Methods and schemes that an engine has, from which compute capability on.

    Source: get_min_capability of the methods and schemes, transformers' quantizers.
    """
    view = context.view
    if not view.method or not context.readable:
        return
    for engine, rules in context.engines.items():
        if not context.known(engine):
            continue
        for scheme, experts_too in _schemes(context, engine):
            reason = rules.target_refusal(
                view.model_class, view.method, scheme, context.deployment, experts=experts_too
            )
            if reason and reason != EXPERTS_WITH_ZEROS:
                silent = (engine == "hf" and experts_too) or "without a word" in reason
                yield Finding(
                    "D-18",
                    engine,
                    Effect.WRONG if silent else Effect.CRASH,
                    (str(scheme),),
                    reason,
                    Remedy("take another format, engine or card"),
                    "" if silent else f"ValueError: {reason}",
                )
                break
        for scheme in context.schemes:
            for note in rules.target_notes(view.method, scheme, context.deployment):
                yield Finding("D-18", engine, Effect.NOTE, (str(scheme),), note, Remedy(""))


def _schemes(context: Context, engine: str) -> Iterator[tuple[Scheme, bool]]:
    """Schemes in use, and whether experts have them."""
    seen: set[tuple[Scheme, bool]] = set()
    for reading in context.layers(engine):
        scheme = reading.outcome.scheme or (reading.stored[0].scheme if reading.quantized else None)
        if scheme is not None and reading.quantized and not reading.module.drafter:
            key = (scheme, reading.module.kind is Kind.EXPERTS)
            if key not in seen:
                seen.add(key)
                yield key


def _unordered(context: Context, scheme: Scheme) -> bool:
    """Whether SGLang refuses such experts for their zero points."""
    reason = context.engines["sglang"].target_refusal(
        context.view.model_class, context.view.method, scheme, context.deployment, experts=True
    )
    return reason == EXPERTS_WITH_ZEROS


@rule("D-17", "experts of compressed-tensors in SGLang", ("sglang",))
def sglang_experts(context: Context) -> Iterator[Finding]:
    """Integer experts need "pack-quantized" as the top-level format, and no zero points.

    Source: SGLang's compressed_tensors_wNa16_moe.py, fused_moe_triton/layer.py (sglang#39510).
    """
    if "sglang" not in context.engines or context.view.method != "compressed-tensors":
        return
    for reading in context.layers("sglang"):
        if reading.module.kind is not Kind.EXPERTS or not reading.quantized:
            continue
        effect = Effect.RISK if reading.module.drafter else Effect.CRASH
        scheme = reading.outcome.scheme
        if reading.outcome.cause is Cause.FORMAT:
            yield Finding(
                "D-17",
                "sglang",
                effect,
                reading.module.shards,
                reading.outcome.error,
                Remedy(
                    'write "format": "pack-quantized" at the top of quantization_config',
                    Mend.CONFIG,
                    values={"quantization_config.format": "pack-quantized"},
                ),
                "ValueError: For Fused MoE layers, only ['pack-quantized'] is supported",
            )
        elif scheme is not None and _unordered(context, scheme):
            yield Finding(
                "D-17",
                "sglang",
                effect,
                reading.module.shards,
                EXPERTS_WITH_ZEROS,
                Remedy(
                    "quantize experts symmetrically, or dequantize them",
                    Mend.DEQUANTIZE,
                    reading.module.shards,
                ),
                "RuntimeError: The size of tensor a must match the size of tensor b",
            )
