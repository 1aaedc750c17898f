"""Slow kernels for what vLLM's CPU build has none for, or only on a processor with AMX.

vLLM reads the configuration, names and joins modules and loads tensors as ever; only the product
with the weights is computed here, from decoded weights and with activations as they are. So these
kernels can compute in float32, too, and do the same on every processor.
"""

from typing import Any

import torch
from torch.nn.functional import linear, silu
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.mxfp4.base import (
    MxFp4LinearKernel,
    MxFp4LinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # nibbles of a word that hold its outputs


class ReferenceInt8(MPLinearKernel):
    """8-bit integers as compressed-tensors packs them: four in a word, along the inputs."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_type != scalar_types.uint8b128:
            return False, f"{c.weight_type} isn't a symmetric 8-bit integer"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed, scales, _ = self._get_weight_params(layer)
        codes = packed.data.view(torch.uint8).float()  # (out, in)
        size = codes.shape[1] // scales.shape[1]
        weight = (codes - 128) * scales.data.float().repeat_interleave(size, 1)
        layer.reference_weight = weight.to(self.config.act_type)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, layer.reference_weight, bias)


class ReferenceMxfp4(MxFp4LinearKernel):
    """MXFP4 weights with activations as they are.

    vLLM asks for quantized activations whatever the checkpoint says; like this one, its kernel
    for GPUs without MXFP4 units (Marlin) doesn't.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed = layer.weight.data
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
        values = torch.tensor(E2M1 + [-value for value in E2M1])[codes]
        scales = torch.exp2(layer.weight_scale.data.float() - 127)
        size = values.shape[1] // scales.shape[1]
        layer.reference_weight = (values * scales.repeat_interleave(size, 1)).to(layer.params_dtype)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, layer.reference_weight, bias)


class ReferenceFp8Blocks(Fp8BlockScaledMMLinearKernel):
    """FP8 weights with a scale for each block."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        parameters = self._get_layer_params(layer)
        layer.reference_weight = of_blocks(parameters.weight.data, parameters.block_scale.data)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        return linear(x, layer.reference_weight.to(x.dtype), bias)

    def apply_block_scaled_mm(self, **_: Any) -> torch.Tensor:
        raise NotImplementedError("apply_weights does it")


class ReferenceExperts:
    """What takes the place of the methods of vLLM's expert kernels for AMX.

    Weights are gate and up as (experts, 2 * inner, hidden), and down as (experts, hidden, inner).
    """

    def weight(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave them as they are."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        gate_up = self.weight(w1, self.w1_scale).to(hidden_states.dtype)
        down = self.weight(w2, self.w2_scale).to(hidden_states.dtype)
        output.zero_()
        for token, experts in enumerate(topk_ids.tolist()):
            for slot, expert in enumerate(experts):
                gate, up = linear(hidden_states[token], gate_up[expert]).chunk(2)
                result = linear(silu(gate) * up, down[expert])
                output[token] += result * topk_weights[token, slot].to(result.dtype)


class ReferenceInt4Experts(ReferenceExperts):
    def weight(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return stored  # decoded by `decode_int4_experts`


class ReferenceInt8Experts(ReferenceExperts):
    def weight(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return stored.float() * scale.float().reshape(*stored.shape[:2], 1)


class ReferenceFp8Experts(ReferenceExperts):
    def weight(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return of_blocks(stored, scale)


def of_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights (..., out, in) of blocks of 128x128."""
    return codes.float() * scales.repeat_interleave(128, -2).repeat_interleave(128, -1)


def decode_int4_experts(
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    quant_algo: Any,
    w13_zeros: torch.Tensor | None = None,
    w2_zeros: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Weights instead of what vLLM's `prepare_int4_moe_layer_for_cpu` repacks them to.

    Matrices come transposed, (experts, in, out): AWQ's packed along outputs, others along inputs.
    """

    def decode(
        packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None
    ) -> torch.Tensor:
        if quant_algo == cpu_moe.CPUQuantAlgo.AWQ:
            codes, offsets = nibbles(packed, AWQ_ORDER), nibbles(zeros, AWQ_ORDER)
        else:
            codes, offsets = nibbles(packed.mT, range(8)).mT, torch.full(scale.shape, 8)
        size = codes.shape[1] // scale.shape[1]
        offsets, scale = (x.repeat_interleave(size, 1) for x in (offsets, scale.float()))
        return ((codes - offsets).float() * scale).mT.contiguous()

    decoded = decode(w13, w13_scale, w13_zeros), decode(w2, w2_scale, w2_zeros)
    # The last two stand for zero points, which vLLM insists on and nothing reads any more.
    return *decoded, w13_scale, w2_scale, w13_scale, w2_scale


def nibbles(words: torch.Tensor, order: Any) -> torch.Tensor:
    """Eight values for each word of the last dimension, those of nibbles in that order."""
    return torch.stack([(words >> 4 * nibble) & 15 for nibble in order], -1).flatten(-2)


def register() -> None:
    """Make vLLM choose these kernels."""
    # Behind vLLM's own: none takes these formats today.
    kernels.register_linear_kernel(ReferenceInt8, PlatformEnum.CPU, "mp")
    kernels.register_linear_kernel(ReferenceMxfp4, PlatformEnum.CPU, "mxfp4")
    # Instead of vLLM's own, which needs AMX.
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [ReferenceFp8Blocks]
    cpu_moe.prepare_int4_moe_layer_for_cpu = decode_int4_experts
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
    for experts, reference in (
        (cpu_moe.CPUExpertsInt4, ReferenceInt4Experts),
        (cpu_moe.CPUExpertsInt8, ReferenceInt8Experts),
        (cpu_moe.CPUExpertsFp8, ReferenceFp8Experts),
    ):
        experts._supports_current_device = staticmethod(lambda: True)
        experts.weight = reference.weight
        experts.apply = reference.apply
        experts.process_weights_after_loading = reference.process_weights_after_loading
