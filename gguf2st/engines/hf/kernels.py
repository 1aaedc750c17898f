"""What transformers 5.19 loads: it has no kernels of its own for most formats, and decompresses.

Sources: transformers/quantizers/*.py, integrations/compressed_tensors.py, tried with
checkpoints of every format.
"""

from __future__ import annotations

from gguf2st.engines.base import Kind, Matrix, Verdict
from gguf2st.scheme import Scheme


def verdict(matrix: Matrix, quant_method: str, scheme: Scheme) -> Verdict:
    """Any shape that the layout holds is taken; experts are merged, which some schemes don't survive."""
    if matrix.kind is Kind.EXPERTS:
        return Verdict(_experts(quant_method, scheme))
    return Verdict()


def _experts(quant_method: str, scheme: Scheme) -> str:
    """integrations/compressed_tensors.py DecompressExperts: packed symmetric codes, or fp8."""
    if quant_method in ("awq", "gptq"):
        return f"transformers doesn't load {quant_method} experts and leaves random ones"
    if scheme.kind == "int" and not scheme.symmetric:
        return "transformers decompresses experts without zero points only"
    if scheme.kind == "int" and scheme.activation_bits < 16:
        return "transformers can't merge int8 experts"
    if scheme.kind == "nvfp4":
        return "transformers decompresses experts without NVFP4's global scale"
    return ""


def target_refusal(quant_method: str, scheme: Scheme, *, experts: bool) -> str:
    """Methods that it doesn't have."""
    if quant_method == "w4afp8":
        return "transformers has no quantization method w4afp8"
    return _experts(quant_method, scheme) if experts else ""


def notes(quant_method: str, scheme: Scheme) -> tuple[str, ...]:
    """What must be installed beside transformers, and what newer versions break."""
    if quant_method in ("awq", "gptq"):
        extra = " and optimum" if quant_method == "gptq" else ""
        return (f"transformers needs gptqmodel{extra} for {quant_method}",)
    if quant_method == "mxfp4":
        return ("transformers unpacks MXFP4 to bfloat16 unless kernels and triton are installed",)
    if quant_method == "compressed-tensors" and scheme.kind == "int" and not scheme.symmetric:
        return ("transformers 5.23 with compressed-tensors 0.20 doesn't load zero points",)
    return ()
