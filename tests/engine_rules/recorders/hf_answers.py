"""transformers' and compressed-tensors' own decisions about the random configurations."""

from __future__ import annotations

import copy
import types
from typing import Any

from tests.engine_rules.recorders.cases import Case, cases


def answers(models: dict[str, Any]) -> list[dict[str, str]]:
    """For each case: module -> "-" (unquantized), else group size; nothing for GPTQ.

    `models` are models on the meta device.
    """
    import torch
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers.integrations.compressed_tensors import get_experts_scheme
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    def linear(model: Any) -> dict[str, Any]:
        return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}

    def compressed(case: Case, model: Any) -> dict[str, str]:
        model = copy.deepcopy(model)
        config = QuantizationConfig.model_validate(
            {k: v for k, v in case.config.items() if k != "quant_method"}
        )
        for module in list(model.modules()):
            # A regex may hit modules that can't be quantized, which isn't the question here.
            if not isinstance(module, torch.nn.Linear):
                module.__class__ = type(type(module).__name__, (Passive, type(module)), {})
        apply_quantization_config(model, config, run_compressed=False)
        found = {
            name: str(scheme.weights.group_size)
            if (scheme := getattr(module, "quantization_scheme", None))
            else "-"
            for name, module in linear(model).items()
        }
        found["experts"] = str(get_experts_scheme(config).weights.group_size)
        return found

    def listed(case: Case, model: Any) -> dict[str, str]:
        entries = case.config["modules_to_not_convert"]
        keep = model._keep_in_fp32_modules
        if case.method == "awq":
            patterns = HfQuantizer.get_modules_to_not_convert(
                model, list(entries), keep, add_default_skips=True
            )
        else:
            quantizer = types.SimpleNamespace(
                quantization_config=types.SimpleNamespace(modules_to_not_convert=list(entries))
            )
            FineGrainedFP8HfQuantizer._normalize_modules_to_not_convert(quantizer, model)
            patterns = HfQuantizer.get_modules_to_not_convert(
                model, quantizer.quantization_config.modules_to_not_convert, keep
            )
        size = "32" if case.method == "awq" else "128"
        names = list(linear(model))
        if case.method == "fp8":
            names += [n for n, _ in model.named_modules() if n.endswith(".experts")]
        return {n: size if should_convert_module(n, patterns) else "-" for n in names}

    from compressed_tensors.utils.internal import InternalModule

    class Passive(InternalModule):
        """compressed-tensors leaves modules of this class alone."""

    return [
        {}
        if case.method == "gptq"
        else (compressed if case.method == "compressed-tensors" else listed)(
            case, models[case.model_class]
        )
        for case in cases()
    ]
