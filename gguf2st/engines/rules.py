"""All engines of a request as one: what a plan asks before and after it decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gguf2st.engines import check
from gguf2st.engines.base import Config, Deployment, Engine, EngineModule, Kind, Matrix
from gguf2st.engines.hf import Transformers
from gguf2st.engines.sglang import SgLang
from gguf2st.engines.vllm import Vllm
from gguf2st.errors import UsageError
from gguf2st.scheme import Scheme

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Vllm(), SgLang(), Transformers())}


def engine_named(name: str) -> Engine:
    """The engine of that name. Raises `UsageError` listing all."""
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}.")
    return ENGINES[name]


def quant_method(target: str, scheme: Scheme) -> str:
    """The `quant_method` that a target writes to config.json."""
    if scheme.stacked:
        return "mxfp4"
    if target == "fp8":
        return "fp8" if scheme.block_rows > 1 else "compressed-tensors"
    return target if target in ("awq", "gptq", "w4afp8") else "compressed-tensors"


class EngineRules:
    """Rules of the engines that a checkpoint of one model class shall run in.

    `text_config` is config.json, or its text_config: widths of heads are taken from it.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        model_class: str,
        target: str,
        deployment: Deployment,
        text_config: Mapping[str, Any],
    ) -> None:
        self.engines = [engine for engine in engines if model_class in engine.model_classes()]
        self.unknown = [e.title for e in engines if model_class not in e.model_classes()]
        self._model_class, self._target, self._deployment = model_class, target, deployment
        self._text_config = text_config.get("text_config", text_config)

    def target_refusals(self, schemes: Sequence[Scheme], *, experts: bool) -> dict[str, str]:
        """Engine's title -> why it takes none of these schemes in this model, whatever the shapes.

        `experts` tells that experts are among the modules.
        """
        refusals = {}
        for engine in self.engines:
            reasons = [self._target_refusal(engine, scheme, experts) for scheme in schemes]
            if reasons and all(reasons):
                refusals[engine.title] = reasons[0]
        return refusals

    def notes(self, schemes: Sequence[Scheme]) -> list[str]:
        """What works but not as fast or as written, and what must be installed beside an engine."""
        found: dict[str, None] = {}
        for engine in self.engines:
            for scheme in schemes:
                method = quant_method(self._target, scheme)
                found.update(dict.fromkeys(engine.target_notes(method, scheme, self._deployment)))
        return list(found)

    def partners(self, names: Sequence[str]) -> list[list[str]]:
        """See `check.partners`."""
        return check.partners(self.engines, self._model_class, names)

    def experts_alike(self, scheme: Scheme) -> bool:
        """Whether some engine has one scheme for the experts of the whole model."""
        method = quant_method(self._target, scheme)
        return any(method in engine.alike_experts for engine in self.engines)

    def never(self, name: str) -> str | None:
        """Why an engine never quantizes the module, or None."""
        for engine in self.engines:
            module = engine.module_names(self._model_class, [name])[name]
            if module is None:
                return f"{engine.title} has no linear layer of that name"
            if module.unquantized:
                return module.unquantized
        return None

    def refusal(self, shapes: Mapping[str, tuple[int, int]], scheme: Scheme) -> str | None:
        """Why an engine can't run a fused group, given as modules with their shapes (out, in)."""
        method = quant_method(self._target, scheme)
        for engine in self.engines:
            modules = engine.module_names(self._model_class, list(shapes))
            for name, layer in modules.items():
                if layer is None:
                    return f"{engine.title} has no linear layer {name}"
            for module in {id(m): m for m in modules.values() if m is not None}.values():
                if module.unquantized:
                    return module.unquantized
                reason = self._target_refusal(engine, scheme, module.kind is Kind.EXPERTS)
                if not reason:
                    matrix = stacked(module, shapes, self._text_config)
                    reason = engine.verdict(matrix, method, scheme, self._deployment).refusal
                if reason:
                    return f"{engine.title}: {reason}"
        return None

    def shape_notes(self, shapes: Mapping[str, tuple[int, int]], scheme: Scheme) -> list[str]:
        """What a fused group costs in an engine that takes it."""
        method = quant_method(self._target, scheme)
        found: dict[str, None] = {}
        for engine in self.engines:
            modules = engine.module_names(self._model_class, list(shapes))
            for module in {id(m): m for m in modules.values() if m is not None}.values():
                matrix = stacked(module, shapes, self._text_config)
                notes = engine.verdict(matrix, method, scheme, self._deployment).notes
                found.update(dict.fromkeys(f"{module.name}: {note}" for note in notes))
        return list(found)

    def contradictions(
        self,
        quantized: Mapping[str, Scheme],
        unquantized: Sequence[str],
        config: Config,
        plain: Sequence[str] = (),
        *,
        drafter: bool = False,
    ) -> list[str]:
        """See `check.contradictions`; of all engines."""
        return [
            sentence
            for engine in self.engines
            for sentence in check.contradictions(
                engine, self._model_class, quantized, unquantized, config, plain, drafter=drafter
            )
        ]

    def _target_refusal(self, engine: Engine, scheme: Scheme, experts: bool) -> str:
        method = quant_method(self._target, scheme)
        return engine.target_refusal(
            self._model_class, method, scheme, self._deployment, experts=experts
        )


def stacked(
    module: EngineModule,
    shapes: Mapping[str, tuple[int, int]],
    text_config: Mapping[str, Any],
) -> Matrix:
    """The matrix that an engine stacks from modules of these shapes (out, in)."""
    known = [shapes[shard] for shard in module.shards if shard in shapes]
    if module.kind is Kind.EXPERTS:
        out = known[0][0]
        rows = _cut(out, module.cuts[0], {}) if module.cuts else (out, out)
        return Matrix(module.name, module.kind, rows, known[0][1])
    widths = _widths(text_config)
    rows = tuple(
        width
        for place, (out, _) in enumerate(known)
        for width in _cut(out, module.cuts[place] if place < len(module.cuts) else "", widths)
    )
    head = widths.get("head", 0) if module.kind is Kind.QKV and len(rows) == 3 else 0
    return Matrix(
        module.name,
        module.kind,
        rows,
        known[0][1],
        head=head,
        only_weight=module.only_weight,
    )


def _widths(text_config: Mapping[str, Any]) -> dict[str, int]:
    """Widths that layers are cut into, as far as the config tells them."""
    get = text_config.get
    widths = {}
    if head := get("head_dim") or get("hidden_size", 0) // (get("num_attention_heads") or 1):
        widths["head"] = int(head)
    if heads := get("linear_num_value_heads"):
        widths["heads"] = int(heads)
        widths["value"] = int(heads) * int(text_config["linear_value_head_dim"])
        widths["key"] = int(text_config["linear_num_key_heads"]) * int(
            text_config["linear_key_head_dim"]
        )
    return widths


_FRACTIONS = {"half": 2, "third": 3}


def _cut(out: int, cut: str, widths: Mapping[str, int]) -> tuple[int, ...]:
    parts = tuple(
        out // _FRACTIONS[n] if n in _FRACTIONS else widths.get(n, 0) for n in cut.split()
    )
    return parts if parts and sum(parts) == out else (out,)
