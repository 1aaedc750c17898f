"""Which matrices vLLM 0.32's kernels take, per tensor-parallel rank.

Sources, below vllm/model_executor: kernels/linear/__init__.py (order of kernels),
kernels/linear/mixed_precision/*.py (can_implement), layers/quantization/auto_awq.py,
auto_gptq.py, utils/fp8_utils.py, utils/marlin_utils.py, compressed_tensors/schemes/*.py
and compressed_tensors_moe/*.py. Kernels that need a package of their own (Conch,
Humming, FlashInfer) are left out: a checkpoint must load without them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gguf2st.engines.base import Cause, Deployment, Kind, Matrix, Verdict
from gguf2st.engines.shapes import (
    block_refusal,
    fits_marlin,
    halved_groups,
    over_ranks,
    straddles,
    words,
)
from gguf2st.scheme import Scheme

# utils/marlin_utils.py MARLIN_SUPPORTED_GROUP_SIZES; 0 is a scale for each row.
MARLIN_GROUPS = (0, 32, 64, 128)
PADDED = "vLLM pads it to the tiles of its kernel, which costs time (older versions refuse it)"


@dataclass(frozen=True)
class IntegerKernel:
    """A mixed-input kernel: bits without and with zero points, group sizes, divisors of a rank's part."""

    name: str
    capability: int
    symmetric: tuple[int, ...]
    asymmetric: tuple[int, ...]
    groups: tuple[int, ...] | None  # None: any but a scale for each row
    rows: int = 1
    columns: int = 1
    only: bool = False  # for exactly this capability
    float16: bool = False  # for no other dtype

    def refusal(self, part: Matrix, scheme: Scheme, deployment: Deployment) -> str:
        """Why the kernel doesn't take one rank's part; "" if it does."""
        capability = deployment.compute_capability
        if deployment.below(self.capability):
            return f"needs compute capability {self.capability}"
        if self.only and capability != self.capability:
            return f"needs exactly compute capability {self.capability}"
        if self.float16 and deployment.dtype != "float16":
            return "needs float16"
        if scheme.bits not in (self.symmetric if scheme.symmetric else self.asymmetric):
            return (
                f"has no {scheme.bits} bits {'without' if scheme.symmetric else 'with'} zero points"
            )
        if not self._has_groups(scheme.group_size):
            return f"has no groups of {scheme.group_size}" if scheme.group_size else "needs groups"
        if sum(part.rows) % self.rows:
            return f"needs a multiple of {self.rows} rows, not {sum(part.rows)}"
        if part.columns % self.columns:
            return f"needs a multiple of {self.columns} columns, not {part.columns}"
        return ""

    def _has_groups(self, size: int) -> bool:
        return size > 0 if self.groups is None else size in self.groups


# kernels/linear/__init__.py _POSSIBLE_KERNELS[CUDA], in that order.
CUDA_KERNELS = (
    IntegerKernel("Machete", 90, (4, 8), (4, 8), (0, 64, 128), rows=128, columns=64, only=True),
    IntegerKernel("Marlin", 75, (4, 8), (4,), MARLIN_GROUPS),
    IntegerKernel("Exllama", 60, (4, 8), (), None, rows=8, float16=True),
    IntegerKernel("Triton", 75, (4,), (4,), (0, 32, 64, 128, 256), rows=8),
)
# mixed_precision/cpu.py: oneDNN's packing.
CPU_KERNELS = (IntegerKernel("CPU", 0, (4,), (4,), (0, 16, 32, 64, 128, 256), rows=32, columns=32),)


def verdict(matrix: Matrix, quant_method: str, scheme: Scheme, deployment: Deployment) -> Verdict:
    """Whether a kernel takes the matrix at every requested number of ranks."""
    if _replicated(matrix, quant_method, deployment):
        matrix = replace(matrix, kind=Kind.REPLICATED)

    def of_rank(part: Matrix, ranks: int) -> Verdict:
        if quant_method == "mxfp4":
            return Verdict()  # models/gpt_oss.py deals out whole groups and pads
        if matrix.kind is Kind.EXPERTS:
            return _experts(part, quant_method, scheme, deployment)
        if scheme.kind == "int" and scheme.activation_bits == 16:
            return _integers(part, quant_method, scheme, deployment)
        return _others(matrix, part, scheme, ranks)

    return over_ranks(matrix, deployment, of_rank)


def _replicated(matrix: Matrix, quant_method: str, deployment: Deployment) -> bool:
    """layers/mamba/gdn/qwen_gdn_linear_attn.py maybe_disable_tp: Qwen3.5's, not Qwen3-Next's."""
    return (
        matrix.name.endswith("linear_attn.in_proj_ba")
        and len(matrix.rows) > 1
        and quant_method in ("awq", "gptq")
        and not deployment.cpu
    )


def _integers(part: Matrix, quant_method: str, scheme: Scheme, deployment: Deployment) -> Verdict:
    if reason := straddles(part, scheme):
        return Verdict(reason, cause=Cause.GROUPS)
    if quant_method == "awq" or not scheme.symmetric:
        reason = words(part, scheme.bits, "codes" if quant_method == "awq" else "zero points")
        if reason:
            return Verdict(reason, cause=Cause.WORDS)
    if quant_method == "awq":
        scheme = replace(scheme, symmetric=False)  # always stored with zero points
    reasons = []
    for kernel in CPU_KERNELS if deployment.cpu else CUDA_KERNELS:
        reason = kernel.refusal(part, scheme, deployment)
        if not reason:
            return Verdict(notes=_integer_notes(kernel, part))
        reasons.append(f"{kernel.name} {reason}")
    known = scheme.group_size in MARLIN_GROUPS
    return Verdict(
        f"no kernel takes it: {'; '.join(reasons)}",
        cause=Cause.KERNEL if known else Cause.GROUP_SIZE,
    )


def _integer_notes(kernel: IntegerKernel, part: Matrix) -> tuple[str, ...]:
    if kernel.name == "Marlin":
        return () if fits_marlin(part) else (PADDED,)
    return () if kernel.name in ("Machete", "CPU") else (f"only the slow {kernel.name} takes it",)


def _others(matrix: Matrix, part: Matrix, scheme: Scheme, ranks: int) -> Verdict:
    if scheme.block_rows > 1:
        reason = block_refusal(matrix, part, scheme, ranks, last_may_end=True)
        return Verdict(reason, cause=Cause.TILES if reason else Cause.NONE)
    if scheme.kind in ("nvfp4", "mxfp4") and (reason := straddles(part, scheme)):
        return Verdict(reason, cause=Cause.GROUPS)
    return Verdict()  # a scale for each row: any shape


def _experts(part: Matrix, quant_method: str, scheme: Scheme, deployment: Deployment) -> Verdict:
    """compressed_tensors_moe/*.py, auto_awq.py, auto_gptq.py: gate and up (inner, hidden), down."""
    inner, hidden, group = part.rows[0], part.columns, scheme.group_size
    if scheme.block_rows > 1:
        if inner % scheme.block_rows:
            return Verdict(f"{inner} rows per rank are no whole blocks of {scheme.block_rows}")
        return Verdict()
    if scheme.kind in ("nvfp4", "mxfp4"):
        if inner % group or hidden % 64:
            return Verdict(f"experts need a hidden size of whole 64, and whole groups of {group}")
        return Verdict()
    if scheme.kind != "int" or scheme.activation_bits < 16:
        return Verdict()
    if quant_method in ("awq", "gptq"):
        return _packed_experts(inner, hidden, group)
    return _compressed_experts(inner, hidden, scheme, deployment)


def _packed_experts(inner: int, hidden: int, group: int) -> Verdict:
    """marlin_utils.py check_moe_marlin_supports_config; else moe_wna16.py, which halves groups."""
    if hidden % 128 == 0 and (not group or inner % group == 0):
        return Verdict()
    if not halved_groups(inner, hidden, group):
        return Verdict(f"experts of {inner} x {hidden} per rank have no whole groups")
    return Verdict(notes=("vLLM falls back from Marlin to slower experts",))


def _compressed_experts(inner: int, hidden: int, scheme: Scheme, deployment: Deployment) -> Verdict:
    """compressed_tensors_moe_wna16.py create_weights and its backends."""
    group = scheme.group_size
    if group and hidden % group:
        return Verdict(f"a hidden size of {hidden} is no whole groups of {group}")
    if group and inner % group:
        return Verdict(f"experts' {inner} columns per rank are no whole groups of {group}")
    if not scheme.symmetric:
        if deployment.cpu:
            return Verdict("vLLM on CPUs has no experts with zero points")
        if scheme.bits != 4:
            return Verdict(f"vLLM has no experts of {scheme.bits} bits with zero points")
        if 2 * inner % 8 or hidden % 8:
            return Verdict("experts' rows per rank don't fill whole words of zero points")
    if deployment.cpu and group == 32:
        # experts/cpu_moe.py CPUExpertsInt4 takes the key of groups of 32 not at all.
        return Verdict("vLLM on CPUs has no experts in groups of 32")
    if deployment.cpu or (hidden % 128 == 0 and group in MARLIN_GROUPS):
        return Verdict()
    if not group:
        return Verdict(
            f"experts with a scale per row need a hidden size of whole 128, not {hidden}"
        )
    return Verdict(notes=("vLLM falls back from Marlin to slower experts",))


def target_refusal(
    quant_method: str, scheme: Scheme, deployment: Deployment, *, experts: bool
) -> str:
    """What no shape can change: methods, capabilities, dtypes."""
    if quant_method == "w4afp8":
        return "vLLM has no quantization method w4afp8"
    if deployment.cpu:
        return _cpu_refusal(scheme, experts)
    # get_min_capability of the schemes; fp8 and NVFP4 run through Marlin on older GPUs.
    minimum = 80 if scheme.kind == "mxfp4" else 75
    if deployment.below(minimum):
        return f"vLLM needs compute capability {minimum} for it"
    if deployment.below(80) and deployment.dtype == "bfloat16":
        return "GPUs below compute capability 80 have no bfloat16; use float16"
    if quant_method == "gptq" and not scheme.symmetric:
        return "vLLM reads symmetric GPTQ only"
    return ""


def _cpu_refusal(scheme: Scheme, experts: bool) -> str:
    """Tried on vLLM's CPU build (kernels/linear/__init__.py, its lists for CPU)."""
    if scheme.kind in ("nvfp4", "mxfp4"):
        return f"vLLM on CPUs has no kernel for {scheme.kind}"
    if scheme.kind == "fp8":
        if experts and scheme.block_rows == 1:
            return "vLLM on CPUs takes fp8 experts in blocks only"
        return ""
    if scheme.activation_bits == 8:
        return ""
    if scheme.bits != 4:
        return f"vLLM on CPUs has no weight-only integers of {scheme.bits} bits"
    return ""


def notes(scheme: Scheme, deployment: Deployment) -> tuple[str, ...]:
    """What works, but not as fast or not as written."""
    found = []
    if not deployment.cpu:
        if scheme.kind == "fp8" and deployment.below(89):
            found.append("below compute capability 89 vLLM computes fp8 with 16-bit activations")
        if scheme.kind in ("nvfp4", "mxfp4") and not scheme.stacked and deployment.below(100):
            found.append(f"below compute capability 100 vLLM runs {scheme.kind} through Marlin")
    return tuple(found)
