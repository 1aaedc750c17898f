"""SGLang's own decisions about the random configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.engine_rules.recorders.cases import Case, cases


def answers(recorded: dict[str, Any]) -> list[dict[str, str]]:
    """For each case: layer -> "-" (unquantized), "!" (raises), else group size or bits.

    A fake GPU must be installed (fake_cuda).
    """
    import torch
    from sglang.srt.layers import linear, vocab_parallel_embedding
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.layers.quantization.awq import awq
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors as compressed
    from sglang.srt.layers.quantization.gptq import gptq
    from sglang.srt.models.utils import WeightsMapper

    class Chosen(str):
        """A method's answer that takes the attributes SGLang sets."""

    # What a method would do with a layer is of no interest, only which one is chosen.
    compressed.CompressedTensorsWNA16 = lambda **k: Scheme(k["group_size"])
    compressed.CompressedTensorsWNA16MoE = lambda config, weight_quant: Scheme(
        weight_quant.group_size
    )
    compressed.UnquantizedFusedMoEMethod = lambda *_: Chosen("-")
    awq.verify_marlin_supported = lambda *_, **__: None
    awq.check_marlin_supports_layer = lambda *_, **__: True
    awq.check_moe_marlin_supports_layer = lambda *_, **__: True
    awq.AWQMarlinConfig.get_linear_scheme = lambda self, layer: Scheme(self.group_size)
    awq.AWQMarlinConfig.get_moe_scheme = lambda self, layer: Scheme(self.group_size)
    fp8.Fp8LinearMethod = lambda config: Chosen(config.weight_block_size[0])
    fp8.Fp8MoEMethod = lambda config: Chosen(config.weight_block_size[0])
    fp8.UnquantizedFusedMoEMethod = lambda *_: Chosen("-")
    gptq.GPTQMarlinLinearMethod = lambda config: Chosen(config.weight_bits)
    gptq.GPTQMarlinMoEMethod = lambda config: Chosen(config.weight_bits)

    class Scheme:
        """Stands for the scheme of a layer."""

        def __init__(self, group_size: int) -> None:
            self.group_size = group_size

        def get_min_capability(self) -> int:
            return 80

    classes = {
        name: getattr(linear, name)
        for name in (
            "ColumnParallelLinear",
            "MergedColumnParallelLinear",
            "QKVParallelLinear",
            "ReplicatedLinear",
            "RowParallelLinear",
        )
    } | {"FusedMoE": FusedMoE, "ParallelLMHead": vocab_parallel_embedding.ParallelLMHead}
    builders: dict[str, Callable[[dict[str, Any]], Any]] = {
        "compressed-tensors": compressed.CompressedTensorsConfig.from_config,
        "awq": awq.AWQMarlinConfig.from_config,
        "fp8": fp8.Fp8Config.from_config,
        "gptq": gptq.GPTQMarlinConfig.from_config,
    }

    def answer(case: Case, config: Any, prefix: str, facts: dict[str, Any]) -> str:
        layer = classes[facts["class"]].__new__(classes[facts["class"]])
        torch.nn.Module.__init__(layer)
        layer.use_triton_kernels = layer.use_flashinfer_trtllm_moe = False
        try:
            method = config.get_quant_method(layer, prefix)
        except ValueError:
            return "!"
        if isinstance(method, str):
            return str(method)
        if method is None or "Unquantized" in type(method).__name__:
            return "-"
        return str(layer.scheme.group_size)

    results = []
    for case in cases():
        about = recorded[case.model_class]
        packed = {k: list(v) for k, v in about["packed"].items()}
        config = builders[case.method](
            copy.deepcopy(case.config) | {"packed_modules_mapping": packed}
        )
        if about["mapper"]:
            config.apply_weight_name_mapper(
                WeightsMapper(**{f"orig_to_new_{k}": v for k, v in about["mapper"].items()})
            )
        results.append(
            {
                prefix: answer(case, config, prefix, facts)
                for prefix, facts in sorted(about["layers"].items())
                if facts["class"] in classes and prefix
            }
        )
    return results
