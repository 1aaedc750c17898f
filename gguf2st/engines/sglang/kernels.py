"""Which matrices SGLang 0.5.23's kernels take, per tensor-parallel rank.

Sources, below sglang/srt/layers/quantization: compressed_tensors/schemes/*.py,
awq/awq.py, gptq/*.py, fp8.py, w4afp8.py, marlin_utils.py; the assertions of Marlin's
repacking in sglang/kernels/jit/csrc/gemm/marlin. SGLang doesn't pad integer weights.
"""

from __future__ import annotations

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

MARLIN_GROUPS = (0, 32, 64, 128)
PLAIN_AWQ = "SGLang falls back from Marlin to slow AWQ kernels"
EXPERTS_WITH_ZEROS = (
    "SGLang loads zero points of compressed-tensors experts in the wrong order (sglang#39510)"
)


def verdict(matrix: Matrix, quant_method: str, scheme: Scheme, deployment: Deployment) -> Verdict:
    """Whether a kernel takes the matrix at every requested number of ranks."""
    packed = scheme.kind in ("int", "nvfp4", "mxfp4") and quant_method != "w4afp8"
    if matrix.only_weight and packed and scheme.activation_bits == 16:
        return Verdict(f"{matrix.only_weight}, which packed codes don't have", cause=Cause.NAME)

    def of_rank(part: Matrix, ranks: int) -> Verdict:
        if quant_method == "mxfp4":
            return Verdict()  # models/gpt_oss.py deals out whole groups and pads
        if matrix.kind is Kind.EXPERTS:
            return _experts(part, quant_method, scheme)
        if scheme.kind == "int" and scheme.activation_bits == 16:
            return _integers(part, quant_method, scheme, deployment)
        if scheme.block_rows > 1:
            reason = block_refusal(matrix, part, scheme, ranks, last_may_end=False)
            return Verdict(reason, cause=Cause.TILES if reason else Cause.NONE)
        if scheme.kind in ("nvfp4", "mxfp4") and (reason := straddles(part, scheme)):
            return Verdict(reason, cause=Cause.GROUPS)
        if scheme.kind == "fp8" and deployment.below(89) and not fits_marlin(part):
            return Verdict(_tiles(part), cause=Cause.TILES)
        return Verdict()

    return over_ranks(matrix, deployment, of_rank)


def _tiles(part: Matrix) -> str:
    """kernels/jit/csrc/gemm/marlin/gptq_marlin_repack.cuh: size_n % 64; gptq_marlin.cuh: tiles."""
    return (
        f"{sum(part.rows)} rows x {part.columns} columns per rank don't fill Marlin's tiles "
        "(64 x 128 or 128 x 64), and SGLang doesn't pad"
    )


def _integers(part: Matrix, quant_method: str, scheme: Scheme, deployment: Deployment) -> Verdict:
    if scheme.group_size not in MARLIN_GROUPS:
        return Verdict(f"SGLang has no groups of {scheme.group_size}", cause=Cause.GROUP_SIZE)
    if reason := straddles(part, scheme):
        return Verdict(reason, cause=Cause.GROUPS)
    if quant_method == "awq" or not scheme.symmetric:
        reason = words(part, scheme.bits, "codes" if quant_method == "awq" else "zero points")
        if reason:
            return Verdict(reason, cause=Cause.WORDS)
    if quant_method == "awq":
        # awq.py: marlin_utils.py check_marlin_supports_layer asks for 64 rows and 128 columns.
        marlin = sum(part.rows) % 64 == 0 and part.columns % 128 == 0
        return Verdict(notes=() if marlin and not deployment.below(80) else (PLAIN_AWQ,))
    return Verdict() if fits_marlin(part) else Verdict(_tiles(part), cause=Cause.TILES)


def _experts(part: Matrix, quant_method: str, scheme: Scheme) -> Verdict:
    inner, hidden, group = part.rows[0], part.columns, scheme.group_size
    if quant_method == "w4afp8" and scheme.kind == "int":
        if inner % group or hidden % group:
            return Verdict(f"experts of {inner} x {hidden} per rank have no whole groups")
        return Verdict()
    if scheme.block_rows > 1:
        if inner % scheme.block_rows:
            return Verdict(f"{inner} rows per rank are no whole blocks of {scheme.block_rows}")
        return Verdict()
    if scheme.kind == "int" and scheme.activation_bits == 16:
        # marlin_utils.py check_moe_marlin_supports_layer; compressed-tensors doesn't even ask.
        fits = hidden % 128 == 0 and inner % max(64, group) == 0 and group in MARLIN_GROUPS
        if fits:
            return Verdict()
        if quant_method == "awq" and halved_groups(inner, hidden, group):
            return Verdict(notes=("SGLang falls back from Marlin to slower experts",))
        return Verdict(f"experts of {inner} x {hidden} per rank don't fill Marlin's tiles")
    if scheme.kind == "nvfp4" and (inner % group or hidden % 64):
        return Verdict(f"experts of {inner} x {hidden} per rank have no whole groups")
    return Verdict()


def target_refusal(
    quant_method: str, scheme: Scheme, deployment: Deployment, *, experts: bool
) -> str:
    """What no shape can change: methods, capabilities, dtypes, what is broken."""
    if deployment.cpu:
        return "SGLang's CPU engine needs a build of its own, which these rules don't cover"
    if scheme.kind == "mxfp4" and quant_method != "mxfp4":
        # compressed_tensors.py _get_scheme_from_parts has no branch for it.
        return "SGLang has no compressed-tensors scheme for MXFP4"
    minimum = _minimum_capability(quant_method, scheme, experts)
    if deployment.below(minimum):
        return f"SGLang needs compute capability {minimum} for it"
    if deployment.below(80) and deployment.dtype == "bfloat16":
        return "below compute capability 80 SGLang's AWQ needs float16"
    if quant_method == "w4afp8" and deployment.dtype != "bfloat16":
        return "SGLang's w4afp8 needs bfloat16"
    if quant_method == "gptq" and not scheme.symmetric:
        return "SGLang's GPTQ goes through Marlin, which reads symmetric codes only"
    if scheme.kind == "int" and scheme.activation_bits == 16 and quant_method != "awq":
        if not scheme.symmetric and scheme.bits != 4:
            return "SGLang has zero points for 4 bits only"
        if experts and not scheme.symmetric:
            return EXPERTS_WITH_ZEROS
    if experts and scheme.kind == "int" and scheme.bits == 8 and scheme.activation_bits == 8:
        return "SGLang has int8 experts on NPUs only"
    return ""


def _minimum_capability(quant_method: str, scheme: Scheme, experts: bool) -> int:
    """get_min_capability of the methods and schemes; GPTQ without Marlin was removed."""
    if quant_method == "w4afp8":
        return 90
    if quant_method == "awq":
        return 80 if experts else 75
    return 80


def notes(scheme: Scheme, deployment: Deployment) -> tuple[str, ...]:
    """What works, but not as fast or not as written."""
    found = []
    if scheme.kind == "fp8" and deployment.below(89):
        found.append("below compute capability 89 SGLang computes fp8 with 16-bit activations")
    if scheme.kind == "nvfp4" and deployment.below(100):
        found.append("below compute capability 100 SGLang runs NVFP4 through Marlin")
    return tuple(found)
