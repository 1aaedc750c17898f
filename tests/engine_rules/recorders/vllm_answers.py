"""vLLM's own decisions about the random configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.engine_rules.recorders.cases import Case, cases

Layers = dict[str, dict[str, Any]]


def answers(recorded: dict[str, Any]) -> list[dict[str, str]]:
    """For each case: layer -> "-" (unquantized), "!" (raises), else group size or bits."""
    import torch
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8
    from vllm.model_executor.layers.quantization.compressed_tensors import (
        compressed_tensors as compressed,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe,
        compressed_tensors_moe_wna16,
    )
    from vllm.model_executor.models.utils import WeightsMapper

    class Chosen(str):
        """A method's answer that takes the attributes vLLM sets."""

    # What a method would do with a layer is of no interest, only which one is chosen.
    plain = lambda *_: Chosen("-")  # noqa: E731
    compressed_tensors_moe.UnquantizedFusedMoEMethod = plain
    compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod = lambda w, i, m: Chosen(
        w.group_size
    )
    for module in (auto_awq, auto_gptq, fp8):
        module.UnquantizedFusedMoEMethod = plain
    auto_awq.check_moe_marlin_supports_layer = lambda *_, **__: True
    auto_awq.AutoAWQMoEMethod = lambda config, moe: Chosen(config.group_size)
    auto_gptq.check_moe_marlin_supports_layer = lambda *_, **__: True

    auto_gptq.AutoGPTQLinearMethod = lambda config: Chosen(config.weight_bits)
    auto_gptq.AutoGPTQMoEMethod = lambda config, moe: Chosen(config.weight_bits)
    fp8.Fp8LinearMethod = lambda config: Chosen(config.weight_block_size[0])
    fp8.Fp8MoEMethod = lambda config, layer: Chosen(config.weight_block_size[0])

    classes = {
        name: getattr(linear, name)
        for name in (
            "ColumnParallelLinear",
            "MergedColumnParallelLinear",
            "QKVParallelLinear",
            "ReplicatedLinear",
            "RowParallelLinear",
        )
    } | {
        "GateLinear": GateLinear,
        "RoutedExperts": RoutedExperts,
        "ParallelLMHead": vocab_parallel_embedding.ParallelLMHead,
        "VocabParallelEmbedding": vocab_parallel_embedding.VocabParallelEmbedding,
    }
    builders: dict[str, Callable[[dict[str, Any]], Any]] = {
        "compressed-tensors": compressed.CompressedTensorsConfig.from_config,
        "awq": auto_awq.AutoAWQConfig.from_config,
        "fp8": fp8.Fp8Config.from_config,
        "gptq": auto_gptq.AutoGPTQConfig.from_config,
    }

    def bare(name: str, facts: dict[str, Any]) -> Any:
        layer = classes[name].__new__(classes[name])
        torch.nn.Module.__init__(layer)
        layer.moe_config = None
        if projections := facts.get("projections"):
            layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = (
                projections
            )
        return layer

    def answer(case: Case, config: Any, prefix: str, facts: dict[str, Any]) -> str:
        layer = bare(facts["class"], facts)
        try:
            method = config.get_quant_method(layer, prefix)
        except ValueError:
            return "!"
        if isinstance(method, str):
            return str(method)
        if method is None or "Unquantized" in type(method).__name__:
            return "-"
        if case.method == "compressed-tensors":
            return str(getattr(layer, "scheme", method).group_size)
        return str(config.group_size)

    results = []
    for case in cases():
        about = recorded[case.model_class]
        config = builders[case.method](copy.deepcopy(case.config))
        config.packed_modules_mapping = {k: list(v) for k, v in about["packed"].items()}
        if case.method == "gptq":
            config.modules_in_block_to_quantize = list(case.quantized)
        for rules in about["mappers"]:
            config.apply_vllm_mapper(
                WeightsMapper(**{f"orig_to_new_{kind}": values for kind, values in rules.items()})
            )
        results.append(
            {
                prefix: answer(case, config, prefix, facts)
                for prefix, facts in sorted(about["layers"].items())
                if facts["class"] in classes and prefix
            }
        )
    return results
