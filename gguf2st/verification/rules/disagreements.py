"""Where an engine takes a layer for something else than its tensors are, and by which rule's fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gguf2st.engines.base import Cause, Engine, Kind
from gguf2st.engines.names import Packed
from gguf2st.engines.patterns import REGEX, compiled, shard_names
from gguf2st.engines.vllm.matching import rename
from gguf2st.verification.context import Context, LayerReading, agree
from gguf2st.verification.finding import Effect, Finding, Remedy
from gguf2st.verification.stored import Layout

MTP_ONLY = "; plain serving goes without it, speculative decoding doesn't"


@dataclass(frozen=True)
class Disagreement:
    """A layer, the rule that it breaks, why, and by which entries of the config."""

    rule: str
    reading: LayerReading
    reason: str
    entries: tuple[str, ...] = ()


def disagreements(context: Context, engine: str) -> Sequence[Disagreement]:
    """Each layer that the engine misreads, with the one rule that says it best."""
    known: dict[str, list[Disagreement]] = context.answers.setdefault("disagreements", {})
    if engine not in known:
        known[engine] = list(_disagreements(context, engine))
    return known[engine]


def _disagreements(context: Context, engine: str) -> Iterator[Disagreement]:
    method = context.view.method
    for reading in context.layers(engine):
        if any(matrix.layout is Layout.BROKEN for matrix in reading.stored):
            continue
        if reading.quantized and len(reading.quantized) == len(reading.stored):
            found = _quantized(context, context.engines[engine], reading)
        elif reading.quantized:
            found = _mixed(reading)
        else:
            found = _plain(context, context.engines[engine], reading, method)
        if found is not None:
            yield found


def _quantized(context: Context, engine: Engine, reading: LayerReading) -> Disagreement | None:
    module, outcome, method = reading.module, reading.outcome, context.view.method
    if module.unquantized:
        rule = "D-35" if module.kind is Kind.HEAD else "D-19"
        return Disagreement(rule, reading, f"quantized, but {module.unquantized}")
    schemes = {str(matrix.scheme) for matrix in reading.quantized}
    if len(schemes) > 1:
        return Disagreement(
            "D-06", reading, f"one layer of the engine, stored as {_either(schemes)}"
        )
    if outcome.cause is Cause.PARTLY:
        return Disagreement("D-04", reading, outcome.error)
    if outcome.cause is Cause.SCHEMES:
        return Disagreement("D-06", reading, outcome.error)
    if outcome.cause is Cause.FORMAT:
        return Disagreement(
            "D-17" if module.kind is Kind.EXPERTS else "D-30", reading, outcome.error
        )
    if outcome.cause in (Cause.METHOD, Cause.KERNEL):
        return None  # D-18
    written = reading.stored[0].scheme
    if outcome.scheme is None:
        return _unread(context, engine, reading)
    if not agree(written, outcome.scheme, method):
        if written is not None and replace(written, symmetric=outcome.scheme.symmetric) == replace(
            outcome.scheme, activation_bits=written.activation_bits
        ):
            return None  # zero points too many or too few: `companions`
        by = f" (by {outcome.rule!r})" if outcome.rule else ""
        rule = "D-08" if len(context.schemes) > 1 else "D-13"
        return Disagreement(rule, reading, f"stored as {written}, but read as {outcome.scheme}{by}")
    return None


def _unread(context: Context, engine: Engine, reading: LayerReading) -> Disagreement:
    module, method = reading.module, context.view.method
    if module.kind is Kind.HEAD:
        return Disagreement("D-35", reading, "the output head is quantized, and no target names it")
    if reading.unexcepted.scheme is None:
        return Disagreement("D-07", reading, "quantized, but no target matches it")
    names = {module.name, *module.shards, *fused_shards(engine, context.view.model_class, reading)}
    if method == "awq":
        if not context.view.quantization.get("modules_to_not_convert"):
            return Disagreement(
                "D-32",
                reading,
                "modules_to_not_convert is empty, so vLLM excepts the parent of every unquantized "
                "tensor, and with it this layer",
            )
        wide = [e for e in context.entries if any(e in name for name in names)]
        if wide and not set(wide) & names:
            return Disagreement(
                "D-33",
                reading,
                f"quantized, but {_quoted(wide)} is part of its name and excepts it",
            )
    renamed = {
        entry: _renamed(engine, context.view.model_class, entry) for entry in context.entries
    }
    hits = [entry for entry, own in renamed.items() if any(hit(own, name) for name in names)]
    return Disagreement("D-01", reading, "quantized, but excepted", tuple(hits))


def _mixed(reading: LayerReading) -> Disagreement:
    plain = [m.name.rpartition(".")[2] for m in reading.stored if not m.quantized]
    more = f" and {len(plain) - 2} more" if len(plain) > 2 else ""
    return Disagreement(
        "D-06",
        reading,
        f"one layer of the engine, of which {', '.join(plain[:2])}{more} isn't quantized",
    )


def _plain(
    context: Context, engine: Engine, reading: LayerReading, method: str
) -> Disagreement | None:
    module, outcome = reading.module, reading.outcome
    if module.unquantized:
        return None
    if (method, module.kind) in engine.never_excepted:
        if module.drafter:
            return None
        return Disagreement(
            "D-02", reading, f"unquantized, and {engine.title} can't except it from {method}"
        )
    if outcome.cause is Cause.PARTLY:
        return Disagreement("D-04", reading, outcome.error)
    if outcome.cause is Cause.EXPERTS:
        return Disagreement("D-28", reading, outcome.error)
    if outcome.cause is Cause.NO_TARGET:
        return Disagreement("D-07", reading, "not quantized, but neither targeted nor ignored")
    if outcome.scheme is None:
        return None
    by = f" (by {outcome.rule!r})" if outcome.rule else ""
    parts = module.shards if len(module.shards) > 1 else ()
    if parts and all(any(hit(entry, name) for entry in context.entries) for name in parts):
        return Disagreement(
            "D-05",
            reading,
            f"unquantized and its parts are excepted, but {engine.title} asks for "
            f"{module.name.rpartition('.')[2]} alone",
        )
    return Disagreement("D-02", reading, f"unquantized, but read as {outcome.scheme}{by}")


def _renamed(engine: Engine, model_class: str, entry: str) -> str:
    """The entry as the engine translates it; expressions stay as they are."""
    tables = getattr(engine, "models", {})
    if entry.startswith(REGEX) or model_class not in tables:
        return entry
    return rename(entry, tables[model_class].mapper)


def hit(entry: str, name: str) -> bool:
    """Whether an entry means a module of that name, by the common part of all engines' rules."""
    if entry.startswith(REGEX):
        return compiled(entry[len(REGEX) :]).match(name) is not None
    return entry == name or name.endswith(f".{entry}")


def fused_shards(engine: Engine, model_class: str, reading: LayerReading) -> list[str]:
    """What the engine calls the parts of a fused layer when it tests them."""
    tables = getattr(engine, "models", {})
    packed: Packed = tables[model_class].packed if model_class in tables else {}
    return shard_names(reading.module.name, packed) or []


def findings(
    context: Context,
    rule: str,
    effect: dict[str, tuple[Effect, str]],
    remedy: Remedy,
) -> Iterator[Finding]:
    """Findings of one rule: one for each engine and reason. `effect`: engine -> effect and message.

    A drafter's layer is a risk alone: the model itself doesn't load it.
    """
    for engine in context.engines:
        if engine not in effect:
            continue
        grouped: dict[tuple[str, bool], list[Disagreement]] = {}
        for found in disagreements(context, engine):
            if found.rule == rule:
                key = (_general(found), found.reading.module.drafter)
                grouped.setdefault(key, []).append(found)
        for (reason, drafter), alike in grouped.items():
            readings = [found.reading for found in alike]
            entries = list(dict.fromkeys(entry for found in alike for entry in found.entries))
            by = f" by {_quoted(entries)}" if entries else ""
            modules = tuple(name for reading in readings for name in reading.module.shards)
            how, message = (Effect.RISK, "") if drafter else effect[engine]
            yield Finding(
                rule,
                engine,
                how,
                modules,
                reason + by + (MTP_ONLY if drafter else ""),
                Remedy(remedy.text, remedy.mend, remedy.modules or modules),
                _spelled(message, readings[0]),
            )


NO_MODULE = "ValueError: There is no module or parameter named '{layer}.{leaf}'"


def _spelled(message: str, reading: LayerReading) -> str:
    """The message with the names of the first layer; vLLM stumbles elsewhere over stacked ones."""
    module = reading.module
    if message == NO_MODULE and module.kind in (Kind.MERGED, Kind.QKV):
        return f"AttributeError: '{module.layer_class}' object has no attribute 'data'"
    leaves = [leaf for matrix in reading.stored for leaf in matrix.leaves]
    leaf = next((leaf for leaf in ("weight_packed", "qweight") if leaf in leaves), "weight")
    layer = module.name
    for prefix in ("language_model.model.", "model."):
        layer = layer.removeprefix(prefix)
    return message.format(layer=layer, leaf=leaf, whole=module.name)


def _general(found: Disagreement) -> str:
    """The reason without what differs from layer to layer."""
    reason = found.reason
    for name in sorted((found.reading.module.name, *found.reading.module.shards), key=len)[::-1]:
        reason = reason.replace(name, name.rpartition(".")[2])
    return reason


def _either(texts: set[str]) -> str:
    return " and ".join(sorted(texts))


def _quoted(entries: list[str]) -> str:
    more = f" and {len(entries) - 1} more entries" if len(entries) > 1 else ""
    return f"{entries[0]!r}{more}"
