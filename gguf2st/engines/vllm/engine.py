"""vLLM 0.32: what it makes of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gguf2st.engines import configs
from gguf2st.engines.base import (
    Cause,
    Checkpoint,
    Config,
    Deployment,
    EngineModule,
    Kind,
    Matrix,
    Outcome,
    Verdict,
)
from gguf2st.engines.patterns import PartlyMatchedError, gptq_override
from gguf2st.engines.tables import TableEngine
from gguf2st.engines.vllm import kernels, matching
from gguf2st.engines.vllm.models import MODELS
from gguf2st.scheme import Scheme


class Vllm(TableEngine):
    """See `Engine`."""

    name = "vllm"
    title = "vLLM"
    models = MODELS
    unchecked = frozenset[str]()
    # auto_gptq.py get_quant_method: experts that Marlin refuses are built quantized before `dynamic`
    # is looked at, and what stays unquantized for its shape is just that.
    never_excepted = frozenset({("gptq", Kind.EXPERTS)})
    alike_experts = frozenset[str]()

    def outcome(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """get_quant_method of the method's config class."""
        methods: dict[str, Callable[[str, EngineModule, Config, Checkpoint], Outcome]] = {
            "compressed-tensors": self._compressed,
            "awq": self._awq,
            "fp8": self._fp8,
            "gptq": self._gptq,
            "mxfp4": self._mxfp4,
        }
        method = methods.get(config["quant_method"])
        if method is None:
            return Outcome(
                error=f"vLLM has no quantization method {config['quant_method']}",
                cause=Cause.METHOD,
            )
        if module.unquantized:
            return Outcome()
        try:
            return method(model_class, module, config, checkpoint)
        except PartlyMatchedError as error:
            return Outcome(error=str(error), cause=Cause.PARTLY)

    def target_refusal(
        self,
        model_class: str,
        quant_method: str,
        scheme: Scheme,
        deployment: Deployment,
        *,
        experts: bool = False,
    ) -> str:
        """See `Engine`."""
        return kernels.target_refusal(quant_method, scheme, deployment, experts=experts)

    def target_notes(
        self, quant_method: str, scheme: Scheme, deployment: Deployment
    ) -> tuple[str, ...]:
        """See `Engine`."""
        return kernels.notes(scheme, deployment)

    def verdict(
        self, matrix: Matrix, quant_method: str, scheme: Scheme, deployment: Deployment
    ) -> Verdict:
        """See `Engine`."""
        return kernels.verdict(matrix, quant_method, scheme, deployment)

    def _compressed(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """compressed_tensors.py get_scheme_dict, and compressed_tensors_moe.py get_moe_method."""
        mapper, packed = self._mapper(model_class, module), self._packed(model_class, module)
        ignore = [matching.rename_target(entry, mapper) for entry in config.get("ignore") or ()]
        groups = {
            matching.rename_target(target, mapper): group
            for target, group in configs.groups_by_target(config).items()
        }
        if module.kind is Kind.EXPERTS and "Linear" in groups:
            groups.setdefault("RoutedExperts", groups["Linear"])
        targets, found = list(groups), []
        for name in module.probes or (module.name,):
            ignored = matching.ignored(name, ignore, packed)
            target = (
                None
                if ignored
                else matching.matched_target(name, module.layer_class, targets, packed)
            )
            found.append(target)
        schemes = {groups[target].scheme if target else None for target in found}
        if len(schemes) > 1:
            return Outcome(
                error=f"the projections of {module.name} have different schemes",
                cause=Cause.SCHEMES,
            )
        target = found[0]
        if target is None:
            return Outcome()
        group = groups[target]
        if module.kind is Kind.EMBEDDING and (group.scheme.kind, group.scheme.activation_bits) != (
            "int",
            16,
        ):
            return Outcome(
                error="embeddings can be quantized to weight-only integers alone",
                cause=Cause.KERNEL,
            )
        return Outcome(group.scheme, target)

    def _awq(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """auto_awq.py get_quant_method."""
        if not _asks(module, head=bool(config.get("lm_head"))):
            return Outcome()
        entries = config.get("modules_to_not_convert")
        if not entries:
            entries = matching.awq_entries_from_headers(
                checkpoint.plain, list(checkpoint.quantized)
            )
        packed = {} if module.kind is Kind.EXPERTS else self._packed(model_class, module)
        return self._unless_skipped(
            model_class, module, entries, packed, "substring", configs.integer_scheme(config)
        )

    def _fp8(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """fp8.py get_quant_method."""
        if not _asks(module, head=False):
            return Outcome()
        entries = config.get("ignored_layers") or config.get("modules_to_not_convert") or []
        packed = self._packed(model_class, module)
        return self._unless_skipped(
            model_class, module, entries, packed, "exact", configs.fp8_scheme(config)
        )

    def _mxfp4(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """mxfp4.py get_quant_method: experts always, nothing else; exceptions aren't read."""
        return Outcome(configs.STACKED_MXFP4 if module.kind is Kind.EXPERTS else None)

    def _unless_skipped(
        self,
        model_class: str,
        module: EngineModule,
        entries: list[str],
        packed: dict[str, tuple[str, ...]],
        mode: Literal["exact", "substring"],
        scheme: Scheme,
    ) -> Outcome:
        mapper = self._mapper(model_class, module)
        renamed = [matching.rename(entry, mapper) for entry in entries]
        if matching.skipped(module.name, renamed, packed, mode):
            return Outcome()
        return Outcome(scheme)

    def _gptq(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """auto_gptq.py get_quant_method; the list of quantized layers comes from the headers."""
        if not _asks(module, head=bool(config.get("lm_head"))):
            return Outcome()
        dynamic = config.get("dynamic") or {}
        without_mtp = any(key.startswith("-:") and "mtp" in key for key in dynamic)
        if module.drafter and without_mtp and ".layers." in module.name:
            return Outcome()  # models/qwen3_5_mtp.py
        mapper, packed = self._mapper(model_class, module), self._packed(model_class, module)
        # A single expert's name lies in no layer's name, so those can be left out.
        listed = config.get("modules_in_block_to_quantize") or checkpoint.beside_experts
        layers = [matching.rename(name, mapper) for name in listed]
        override = gptq_override(module.name, dynamic)
        if override is False:
            return Outcome()
        if module.kind is not Kind.EXPERTS and not matching.gptq_quantized(
            module.name, layers, packed
        ):
            return Outcome()
        return Outcome(configs.integer_scheme(config, override))


def _asks(module: EngineModule, *, head: bool) -> bool:
    """Whether AWQ, GPTQ and fp8 look at such a layer at all."""
    return module.kind is not Kind.EMBEDDING and (module.kind is not Kind.HEAD or head)
