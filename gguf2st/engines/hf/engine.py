"""transformers 5.19: what it makes of a module."""

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
from gguf2st.engines.hf import kernels, matching
from gguf2st.engines.hf.models import MODELS
from gguf2st.engines.tables import TableEngine
from gguf2st.engines.vllm.matching import rename
from gguf2st.scheme import Scheme

LINEAR = ("Linear", "Module")


class Transformers(TableEngine):
    """See `Engine`."""

    name = "hf"
    title = "transformers"
    models = MODELS
    # optimum replaces modules for GPTQ; its rules aren't known here.
    unchecked = frozenset({"gptq"})
    never_excepted = frozenset[tuple[str, Kind]]()
    # See `matching.experts_group`.
    alike_experts = frozenset({"compressed-tensors"})

    def outcome(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """_process_model_before_weight_loading of the method's quantizer."""
        methods: dict[str, Callable[[str, EngineModule, Config, Checkpoint], Outcome]] = {
            "compressed-tensors": self._compressed,
            "awq": self._awq,
            "fp8": self._fp8,
            "mxfp4": self._mxfp4,
        }
        method = methods.get(config["quant_method"])
        if method is None:
            return Outcome(
                error=f"its rules for {config['quant_method']} aren't known", cause=Cause.METHOD
            )
        if module.unquantized:
            return Outcome()
        return method(model_class, module, config, checkpoint)

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
        if experts:
            for _, layer in self.table(model_class).layers():
                if layer.kind is Kind.EXPERTS and layer.unquantized:
                    return layer.unquantized
        return kernels.target_refusal(quant_method, scheme, experts=experts)

    def target_notes(
        self, quant_method: str, scheme: Scheme, deployment: Deployment
    ) -> tuple[str, ...]:
        """See `Engine`."""
        return kernels.notes(quant_method, scheme)

    def verdict(
        self, matrix: Matrix, quant_method: str, scheme: Scheme, deployment: Deployment
    ) -> Verdict:
        """See `Engine`."""
        return kernels.verdict(matrix, quant_method, scheme)

    def _compressed(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """quantizer_compressed_tensors.py, compressed_tensors apply_quantization_config."""
        if config.get("quantization_status") != "compressed":
            return Outcome(
                error='without "quantization_status": "compressed" no codes are read',
                cause=Cause.FORMAT,
            )
        if module.kind is Kind.EXPERTS:
            return self._compressed_experts(module, config, checkpoint)
        groups = configs.groups_by_target(config)
        target = matching.matched_target(
            module.name, LINEAR, list(groups), config.get("ignore") or ()
        )
        return Outcome(groups[target].scheme, target) if target else Outcome()

    def _compressed_experts(
        self, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """update_weight_conversions: of single experts it reads codes only, all by one group."""
        if any(shard in checkpoint.quantized for shard in module.shards):
            name = matching.experts_group(config["config_groups"])
            return Outcome(configs.group_scheme(config["config_groups"][name]), name)
        if any(shard.rpartition(".experts.")[2][:1].isdigit() for shard in module.shards):
            return Outcome(
                error="single experts without codes are left out and stay random",
                cause=Cause.EXPERTS,
            )
        return Outcome()

    def _awq(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """quantizer_awq.py: the output head is always an exception; experts are no nn.Linear."""
        entries = [*(config.get("modules_to_not_convert") or []), "lm_head"]
        if module.kind is Kind.EXPERTS or not matching.converted(module.name, entries):
            return Outcome()
        return Outcome(configs.integer_scheme(config))

    def _mxfp4(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """integrations/mxfp4.py replace_with_mxfp4_linear: experts alone."""
        entries = config.get("modules_to_not_convert")
        if module.kind is not Kind.EXPERTS or not matching.converted(module.name, entries):
            return Outcome()
        return Outcome(configs.STACKED_MXFP4)

    def _fp8(
        self, model_class: str, module: EngineModule, config: Config, checkpoint: Checkpoint
    ) -> Outcome:
        """quantizer_finegrained_fp8.py: the head is an exception only where none are written."""
        listed = config.get("modules_to_not_convert")
        mapper = self.table(model_class).mapper
        entries = ["lm_head"] if listed is None else [rename(e, mapper) for e in listed]
        if not matching.converted(module.name, entries):
            return Outcome()
        return Outcome(configs.fp8_scheme(config))
