"""What SGLang builds for every model class: run with a Python that has SGLang.

    python -m tests.engine_rules.recorders.record_sglang FILE

No GPU and no kernels are needed (see fake_cuda). Each class is built with a
quantization config that writes down every layer that asks it for a method.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.engine_rules.recorders.sglang_answers import answers
from tests.engine_rules.recorders.sglang_shapes import shapes
from tests.engine_rules.recorders.tiny import CONFIGS, DRAFTERS
from tests.engine_rules.recorders.write import write

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _start(folder: str) -> Any:
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    arguments = ServerArgs(
        model_path=folder,
        device="cuda",
        attention_backend="triton",
        dtype="bfloat16",
        disable_cuda_graph=True,
    )
    set_global_server_args_for_scheduler(arguments)
    parallel = runtime_context.get_parallel()
    for name in runtime_context._derived_widths():
        if name.endswith("rank"):
            try:
                getattr(parallel, name)
            except Exception:
                parallel.override_permanently(**{name: 0})
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(
            backend="gloo",
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method="tcp://127.0.0.1:29659",
        )
        parallel_state.initialize_model_parallel(backend="gloo")
        initialize_dp_attention(arguments)
    return arguments


def record() -> dict[str, Any]:
    from tests.engine_rules.recorders import fake_cuda

    fake_cuda.install()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedFusedMoEMethod,
        UnquantizedLinearMethod,
    )
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.models import qwen3_5_mtp, qwen3_next_mtp

    class Recorder(QuantizationConfig):
        def __init__(self) -> None:
            super().__init__()
            self.layers: dict[str, Any] = {}

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

        def get_scaled_act_names(self) -> list[str]:
            return []

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            seen: dict[str, Any] = {"class": type(layer).__name__}
            method: Any = None
            if isinstance(layer, LinearBase):
                sizes = getattr(layer, "output_sizes", None) or [layer.output_size]
                seen |= {"in": layer.input_size, "out": list(sizes)}
                method = UnquantizedLinearMethod()
            elif isinstance(layer, FusedMoE):
                method = UnquantizedFusedMoEMethod(False, False)
            self.layers[prefix] = seen
            return method

    def build(config: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            model_config = ModelConfig.from_server_args(_start(folder))
            recorder = Recorder()
            model_class = get_model_architecture(model_config)[0]
            recorder.packed_modules_mapping = getattr(model_class, "packed_modules_mapping", {})
            _initialize_model(model_config, LoadConfig(load_format="dummy"), recorder)
        mapper = getattr(model_class, "hf_to_sglang_mapper", None)
        return {
            "class": model_class.__name__,
            "packed": {k: list(v) for k, v in recorder.packed_modules_mapping.items()},
            "mapper": {
                kind: dict(getattr(mapper, f"orig_to_new_{kind}"))
                for kind in ("substr", "prefix", "suffix")
                if mapper is not None and getattr(mapper, f"orig_to_new_{kind}")
            },
            "layers": recorder.layers,
        }

    def build_drafter(name: str) -> dict[str, Any]:
        drafter = (
            qwen3_next_mtp.Qwen3NextForCausalLMMTP
            if "Next" in name
            else qwen3_5_mtp.Qwen3_5ForCausalLMMTP
        )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[name]))
            model_config = ModelConfig.from_server_args(_start(folder))
        recorder = Recorder()
        recorder.packed_modules_mapping = getattr(drafter, "packed_modules_mapping", {})
        drafter(model_config.hf_config, quant_config=recorder)
        return {
            "class": drafter.__name__,
            "packed": {k: list(v) for k, v in recorder.packed_modules_mapping.items()},
            "mapper": {},
            "layers": recorder.layers,
        }

    return {name: build(config) for name, config in CONFIGS.items()} | {
        f"{name} drafter": build_drafter(name) for name in DRAFTERS
    }


if __name__ == "__main__":
    layers = record()
    taken = shapes()  # before the answers, which replace classes of SGLang
    write(Path(sys.argv[1]), layers, answers(layers), taken)
