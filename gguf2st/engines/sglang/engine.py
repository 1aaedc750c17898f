"""SGLang 0.5.23: what it makes of a layer."""

from __future__ import annotations

from collections.abc import Callable

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
from gguf2st.engines.sglang import kernels, matching
from gguf2st.engines.sglang.models import MODELS
from gguf2st.engines.tables import TableEngine
from gguf2st.scheme import Scheme

# w4afp8.py W4AFp8Config: nothing of it can be changed.
W4AFP8_LINEAR = Scheme("fp8", 8, 128, block_rows=128, activation_bits=8)
W4AFP8_EXPERTS = Scheme("int", 4, 128, activation_bits=8)
# What the loader of one model class gets wrong.
NOT_LOADED = {
    # model_loader/auto_loader.py _llama_remap: every "weight_scale_inv" becomes "weight_scale".
    ("LlamaForCausalLM", "fp8"): (
        "SGLang's Llama drops the scales of FP8 blocks without a word (sglang#30234)"
    ),
    # model_loader/utils.py mixtral_supported: any other method means models/mixtral_quant.py.
    ("MixtralForCausalLM", "w4afp8"): (
        "SGLang replaces Mixtral with a class whose experts are linear layers, which w4afp8 "
        "takes for FP8 blocks"
    ),
}


class SgLang(TableEngine):
    """See `Engine`."""

    name = "sglang"
    title = "SGLang"
    models = MODELS
    unchecked = frozenset[str]()
    never_excepted = frozenset[tuple[str, Kind]]()
    alike_experts = frozenset[str]()

    def outcome(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """get_quant_method of the method's config class."""
        methods: dict[str, Callable[[str, EngineModule, Config], Outcome]] = {
            "compressed-tensors": self._compressed,
            "awq": self._awq,
            "fp8": self._fp8,
            "gptq": self._gptq,
            "w4afp8": self._w4afp8,
            "mxfp4": self._mxfp4,
        }
        method = methods.get(config["quant_method"])
        if method is None:
            return Outcome(
                error=f"SGLang has no quantization method {config['quant_method']}",
                cause=Cause.METHOD,
            )
        if module.unquantized:
            return Outcome()
        try:
            return method(model_class, module, config)
        except PartlyMatchedError as error:
            return Outcome(error=str(error), cause=Cause.PARTLY)
        except matching.NoTargetError as error:
            return Outcome(error=str(error), cause=Cause.NO_TARGET)

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
        if reason := NOT_LOADED.get((model_class, quant_method)):
            return reason
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

    def _compressed(self, model_class: str, module: EngineModule, config: Config) -> Outcome:
        """compressed_tensors.py get_linear_scheme, get_lm_head_scheme and get_moe_scheme."""
        mapper, packed = self._mapper(model_class, module), self._packed(model_class, module)
        # Unlike vLLM this renames regular expressions, too.
        ignore = [matching.rename(entry, mapper) for entry in config.get("ignore") or ()]
        groups = {
            matching.rename(target, mapper): group
            for target, group in configs.groups_by_target(config).items()
        }
        if module.kind is Kind.EXPERTS and "Linear" in groups:
            groups.setdefault("FusedMoE", groups["Linear"])
        targets = list(groups)
        if module.kind is Kind.HEAD:
            ignored = matching.ignored(module.name, ignore, packed)
            target = None if ignored else matching.head_target(module.name, targets)
            return Outcome(groups[target].scheme, target) if target else Outcome()
        found = [
            None
            if matching.ignored(name, ignore, packed)
            else matching.matched_target(name, module.layer_class, targets, packed)
            for name in module.probes or (module.name,)
        ]
        schemes = {groups[target].scheme if target else None for target in found}
        if len(schemes) > 1:
            return Outcome(
                error=f"the projections of {module.name} have different schemes",
                cause=Cause.SCHEMES,
            )
        if found[0] is None:
            return Outcome()
        scheme = groups[found[0]].scheme
        if (
            module.kind is Kind.EXPERTS
            and (scheme.kind, scheme.activation_bits) == ("int", 16)
            and config.get("format") != "pack-quantized"
        ):
            # compressed_tensors_wNa16_moe.py looks at the top-level format alone.
            return Outcome(
                error='experts of integers need "format": "pack-quantized" at the top',
                cause=Cause.FORMAT,
            )
        return Outcome(scheme, found[0])

    def _awq(self, model_class: str, module: EngineModule, config: Config) -> Outcome:
        """awq/awq.py AWQMarlinConfig.get_quant_method; entries are never renamed."""
        if module.kind is Kind.HEAD and not config.get("lm_head"):
            return Outcome()
        if matching.awq_skipped(module.name, config.get("modules_to_not_convert") or []):
            return Outcome()
        return Outcome(configs.integer_scheme(config))

    def _fp8(self, model_class: str, module: EngineModule, config: Config) -> Outcome:
        """fp8.py Fp8Config.get_quant_method."""
        if module.kind is Kind.HEAD:
            return Outcome()
        listed = config.get("ignored_layers", config.get("modules_to_not_convert")) or []
        mapper = self._mapper(model_class, module)
        entries = [matching.rename(entry, mapper) for entry in matching.fp8_entries(listed)]
        if matching.fp8_skipped(module.name, entries, self._packed(model_class, module)):
            return Outcome()
        return Outcome(configs.fp8_scheme(config))

    def _gptq(self, model_class: str, module: EngineModule, config: Config) -> Outcome:
        """utils.py get_linear_quant_method: only "dynamic", on fused names; experts always."""
        if module.kind is Kind.HEAD and not config.get("lm_head"):
            return Outcome()
        override = gptq_override(module.name, config.get("dynamic") or {})
        if module.kind is Kind.EXPERTS:
            override = None
        if override is False:
            return Outcome()
        return Outcome(configs.integer_scheme(config, override))

    def _mxfp4(self, model_class: str, module: EngineModule, config: Config) -> Outcome:
        """mxfp4.py Mxfp4Config.get_quant_method: experts always; exceptions aren't read."""
        return Outcome(configs.STACKED_MXFP4 if module.kind is Kind.EXPERTS else None)

    def _w4afp8(self, model_class: str, module: EngineModule, config: Config) -> Outcome:
        """w4afp8.py W4AFp8Config.get_quant_method: no exceptions can be written."""
        if module.kind is Kind.HEAD:
            return Outcome()
        return Outcome(W4AFP8_EXPERTS if module.kind is Kind.EXPERTS else W4AFP8_LINEAR)
