"""Poses as one H100, so that SGLang builds its CUDA layers on a machine that has none.

Kernel packages become inert modules; tensors stay on the CPU. Import it before
anything of SGLang. Nothing is ever computed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._inductor.compile_fx
import transformers
import xgrammar  # all three look for CUDA packages, so they go first
from torch.overrides import TorchFunctionMode

KERNEL_PACKAGES = [
    "IPython",
    "cuda",
    "cutlass",
    "deep_ep",
    "deep_gemm",
    "flash_attn",
    "flash_attn_4",
    "flash_mla",
    "flashinfer",
    "humming",
    "nvshmem",
    "pynvml",
    "quack",
    "sgl_deep_gemm",
    "sgl_kernel",
    "tilelang",
    "torch_memory_saver",
    "triton",
    "tvm_ffi",
]
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="0",
    is_integrated=False,
)
ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_capability": lambda *_: (9, 0),
    "get_device_properties": lambda *_: PROPERTIES,
    "get_device_name": lambda *_: PROPERTIES.name,
    "set_device": lambda *_: None,
    "mem_get_info": lambda *_: (79 << 30, 80 << 30),
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
    "current_stream": lambda *_: MagicMock(),
    "Stream": MagicMock,
    "Event": MagicMock,
    "is_bf16_supported": lambda *_: True,
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "reset_peak_memory_stats": lambda *_: None,
    "get_arch_list": lambda: ["sm_90"],
    "is_current_stream_capturing": lambda: False,
    "_lazy_init": lambda: None,
}


class Inert(types.ModuleType):
    """Any attribute exists and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = "99.0.0" if name == "__version__" else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an inert module for every kernel package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] in KERNEL_PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Inert:
        module = Inert(spec.name)
        module.__path__, module.__file__ = [], "<inert>"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


class OnCpu(TorchFunctionMode):
    """Sends every tensor to the CPU instead."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in ("cuda", "pin_memory"):
            return arguments[0]
        keywords = {k: _on_cpu(v) for k, v in (keywords or {}).items() if k != "pin_memory"}
        return function(*map(_on_cpu, arguments), **keywords)


def install() -> None:
    """Start posing."""
    assert transformers.PreTrainedModel and xgrammar and torch._inductor.compile_fx
    sys.meta_path.insert(0, Finder())
    torch.version.cuda = "13.0"
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, answer)
    if "triton" not in sys.modules:
        from triton.runtime import driver

        driver.active.get_current_target.return_value.backend = "cuda"
    OnCpu().__enter__()
