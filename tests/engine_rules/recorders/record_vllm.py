"""What vLLM builds for every model class: run with a Python that has vLLM.

    python -m tests.engine_rules.recorders.record_vllm FILE

Each class is built on the meta device with a quantization config that writes
down every layer that asks it for a method: prefix, class, widths.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine_rules.recorders.tiny import CONFIGS, DRAFTERS
from tests.engine_rules.recorders.vllm_answers import answers
from tests.engine_rules.recorders.vllm_shapes import shapes
from tests.engine_rules.recorders.write import write

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def record() -> dict[str, Any]:
    import torch
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model

    class Recorder(QuantizationConfig):
        def __init__(self) -> None:
            super().__init__()
            self.layers: dict[str, Any] = {}
            self.mappers: list[Any] = []

        def get_name(self) -> str:
            return "recorder"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Recorder:
            return cls()

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            self.mappers.append(hf_to_vllm_mapper)

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            seen: dict[str, Any] = {"class": type(layer).__name__}
            method = None
            if isinstance(layer, LinearBase):
                sizes = getattr(layer, "output_sizes", None) or [layer.output_size]
                seen |= {"in": layer.input_size, "out": list(sizes)}
                method = UnquantizedLinearMethod()
            elif isinstance(layer, RoutedExperts):
                seen["projections"] = [
                    layer.ckpt_gate_proj_name,
                    layer.ckpt_up_proj_name,
                    layer.ckpt_down_proj_name,
                ]
                method = UnquantizedFusedMoEMethod(layer.moe_config)
            # The mapping as it is when the layer is matched: some classes extend theirs late.
            seen["packed"] = list(self.packed_modules_mapping)
            self.layers[prefix] = seen
            return method

    def build(config: dict[str, Any], *, drafter: bool = False) -> dict[str, Any]:
        overrides = {"hf_overrides": SpeculativeConfig.hf_config_override} if drafter else {}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            model_config = ModelConfig(
                model=folder,
                tokenizer=folder,
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=64,
                **overrides,
            )
            vllm_config = VllmConfig(model_config=model_config)
            recorder = Recorder()
            vllm_config.quant_config = recorder
            with set_current_vllm_config(vllm_config), torch.device("meta"):
                model = initialize_model(vllm_config, model_config=model_config)
            assert type(model) is get_model_architecture(model_config)[0]
        mappers = [
            {
                kind: {str(k): v for k, v in getattr(mapper, f"orig_to_new_{kind}").items()}
                for kind in ("regex", "substr", "prefix", "suffix")
                if getattr(mapper, f"orig_to_new_{kind}")
            }
            for mapper in recorder.mappers
        ]
        own = getattr(type(model), "hf_to_vllm_mapper", None)
        return {
            "class": type(model).__name__,
            "packed": {k: list(v) for k, v in recorder.packed_modules_mapping.items()},
            "mappers": mappers,
            "drops": sorted(k for k, v in own.orig_to_new_prefix.items() if v is None)
            if own
            else [],
            "layers": recorder.layers,
        }

    init_distributed_environment(1, 0, "tcp://127.0.0.1:29657", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        initialize_model_parallel(1, 1)
    return {name: build(config) for name, config in CONFIGS.items()} | {
        # The text-only classes of Qwen3.5 have none: "Invalid model_type qwen3_5_mtp".
        f"{name} drafter": build(CONFIGS[name], drafter=True)
        for name in DRAFTERS
        if "text_config" in CONFIGS[name] or "Next" in name
    }


if __name__ == "__main__":
    layers = record()
    write(Path(sys.argv[1]), layers, answers(layers), shapes())
