"""Rules about dtypes, and about how experts lie."""

from __future__ import annotations

from collections.abc import Iterator, Set

from gguf2st.engines.base import Kind
from gguf2st.verification.context import Context
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy, rule
from gguf2st.verification.stored import FLOATS

_NOT_THERE = Remedy("the weights aren't there: take them from the original", Mend.MISSING)


@rule("D-26", "dtypes")
def dtypes(context: Context) -> Iterator[Finding]:
    """Unquantized tensors are float32 or of the config's dtype; AWQ's scales are float16.

    Source: engines copy into parameters of the model's dtype without a word; what float16
    can't hold becomes infinite.
    """
    view = context.view
    dtype = view.config.get("dtype", view.config.get("torch_dtype"))
    text = view.text_config.get("dtype", dtype)
    own = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    allowed = {own[d] for d in (dtype, text) if isinstance(d, str) and d in own} | {"F32"}
    codes = {tensor for matrix in context.quantized.values() for tensor in matrix.tensors}
    other: dict[str, list[str]] = {}
    for name, tensor in view.tensors.items():
        if name in codes or not allowed - {"F32"}:
            continue
        if tensor.dtype in FLOATS and tensor.dtype not in allowed:
            other.setdefault(tensor.dtype, []).append(name)
    for found, names in other.items():
        what = "loses digits" if found in ("F16", "F64") else "may overflow"
        yield Finding(
            "D-26",
            "",
            Effect.RISK,
            tuple(names),
            f"{found}, and config.json says {dtype}: the engine's cast {what}",
            Remedy(
                f"write dtype into config.json as the tensors have it, or cast them to {dtype}",
                Mend.CAST,
                values=dict.fromkeys(names, own.get(str(dtype), "BF16")),
            ),
        )
    broken = tuple(
        name
        for name, tensor in view.tensors.items()
        if name.endswith((".A_log", ".dt_bias")) and tensor.dtype not in FLOATS
    )
    if broken:
        yield Finding(
            "D-26",
            "",
            Effect.WRONG,
            broken,
            "no floating-point tensor, which it must be",
            _NOT_THERE,
        )


@rule("D-28", "experts lie as engines read them", needs=("tensors",))
def expert_form(context: Context) -> Iterator[Finding]:
    """Quantized experts lie one by one; stacked ones are unquantized, or MXFP4 of gpt-oss.

    Source: the loaders of experts in vLLM's fused_moe and SGLang's fused_moe_triton, and where
    SGLang's models have `load_fused_expert_weights`;
    transformers' conversion_mapping.py, which merges single ones for most classes.
    """
    expected = context.expected
    if expected is None:
        return
    stacks = {name for block in expected.experts if block.each for name, _ in block.stacked}
    quantized = tuple(
        tensor
        for name, matrix in context.canonical_stored.items()
        if name in stacks and matrix.quantized
        for tensor in matrix.tensors
    )
    if quantized:
        for engine in context.engines:
            yield Finding(
                "D-28",
                engine,
                Effect.CRASH if engine == "vllm" else Effect.WRONG,
                quantized,
                "quantized experts in one stack, which no engine reads for this class",
                Remedy("write each expert's gate, up and down by itself", Mend.RENAME),
                "KeyError" if engine == "vllm" else "",
            )
    yield from _single_experts(context)
    yield from _stacked_experts(context, stacks)


def _stacked_experts(context: Context, stacks: Set[str]) -> Iterator[Finding]:
    """SGLang reads unquantized stacks for some classes alone, and passes over others' in silence."""
    if "sglang" not in context.engines or not context.known("sglang"):
        return
    placed = context.placed("sglang")
    left = tuple(
        tensor
        for name, matrix in context.stored.items()
        if not matrix.quantized
        and "" in matrix.leaves
        and placed.get(name) is None
        and context.canonical(name) in stacks
        for tensor in matrix.tensors
    )
    if left:
        yield Finding(
            "D-28",
            "sglang",
            Effect.WRONG,
            left,
            "unquantized experts in one stack, which SGLang passes over for this class",
            Remedy("write each expert's gate, up and down by itself", Mend.RENAME),
        )


def _single_experts(context: Context) -> Iterator[Finding]:
    """Of unquantized single experts transformers reads those of classes that it merges."""
    if "hf" not in context.engines or not context.known("hf"):
        return
    left = tuple(
        name
        for name, module in context.placed("hf").items()
        if module is not None
        and module.kind is Kind.EXPERTS
        and ".experts." in name
        and not context.stored[name].quantized
        and (module.unquantized or context.view.method == "compressed-tensors")
        and any(part.isdigit() for part in name.split(".experts.")[1].split("."))
    )
    if left:
        yield Finding(
            "D-28",
            "hf",
            Effect.WRONG,
            left,
            "unquantized single experts, which transformers leaves out here: they stay random",
            Remedy("stack them as the class holds them", Mend.RENAME),
        )
