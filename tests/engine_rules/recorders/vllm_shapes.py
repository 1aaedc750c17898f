"""vLLM's own rules about shapes, on a fake GPU of each capability."""

from __future__ import annotations

import types
from typing import Any

from tests.engine_rules.recorders.shape_cases import blocks, experts, integers

LETTERS = {
    "MacheteLinearKernel": "H",
    "MarlinLinearKernel": "M",
    "ExllamaLinearKernel": "E",
    "TritonW4A16LinearKernel": "T",
    "CPUWNA16LinearKernel": "C",
}


def shapes() -> dict[str, str]:
    """Kind -> one letter for each case: the kernel, "y" for taken, "-" for refused."""
    import torch
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16 as wna16,
    )
    from vllm.model_executor.layers.quantization.utils import fp8_utils, marlin_utils
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    platform = type(current_platform)
    cpu, capability = False, 80
    real = platform._enum

    def pose(new: int) -> None:
        nonlocal cpu, capability
        cpu, capability = new == 0, new
        platform._enum = real if cpu else PlatformEnum.CUDA

    platform.is_cuda = lambda self: not cpu
    platform.is_cuda_alike = lambda self: not cpu
    platform.is_cpu = lambda self: cpu
    platform.is_device_capability = lambda self, wanted, *_: wanted == capability
    platform.get_device_capability = classmethod(
        lambda cls, *_: None if cpu else DeviceCapability(*divmod(capability, 10))
    )

    def integer(case: Any) -> str:
        pose(case.capability)
        types_of = (
            wna16.WNA16_SUPPORTED_TYPES_MAP
            if case.symmetric
            else wna16.WNA16_ZP_SUPPORTED_TYPES_MAP
        )
        group = case.group_size or -1
        config = kernels.MPLinearLayerConfig(
            full_weight_shape=(case.columns * case.ranks, case.rows),
            partition_weight_shape=(case.columns, case.rows),
            weight_type=types_of[case.bits],
            act_type=getattr(torch, case.dtype),
            group_size=group,
            zero_points=not case.symmetric,
        )
        try:
            kernel = kernels.choose_mp_linear_kernel(config)
            if group > 0:
                wna16.verify_group_size_divides_partition(case.columns, group, "layer")
        except ValueError:
            return "-"
        return LETTERS[kernel.__name__]

    def block(case: Any) -> str:
        layer = types.SimpleNamespace(tp_size=case.ranks)
        split = 1 if case.by_columns else case.ranks
        columns = case.columns // (case.ranks if case.by_columns else 1)
        try:
            fp8_utils.validate_fp8_block_shape(
                layer,
                case.columns,
                sum(case.rows),
                columns,
                [rows // split for rows in case.rows],
                [128, 128],
            )
        except ValueError:
            return "-"
        return "y"

    def expert(case: Any) -> str:
        config = types.SimpleNamespace(
            hidden_dim=case.hidden, intermediate_size_per_partition_unpadded=case.inner
        )
        taken = marlin_utils.check_moe_marlin_supports_config(
            config, case.group_size or -1, allow_tile_padding=True
        )
        return "y" if taken else "-"

    return {
        "integers": "".join(map(integer, integers())),
        "blocks": "".join(map(block, blocks())),
        "experts": "".join(map(expert, experts())),
    }
