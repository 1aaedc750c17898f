"""Output formats."""

from gguf2st.targets import (  # noqa: F401, I001  # they register themselves, and are listed so
    dense,
    awq,
    compressed_tensors,
    fp8,
    gptq,
    lossless,
    mxfp4,
    nvfp4,
    w4afp8,
    w8a8,
)
from gguf2st.targets.base import (
    DTYPE_BYTES,
    EncodeContext,
    ModuleEncoder,
    Piece,
    Quantized,
    Scheme,
    Target,
    TensorSpec,
    target_named,
    target_names,
)
from gguf2st.targets.dense import encode_dense
from gguf2st.targets.options import TargetOptions

__all__ = [
    "DTYPE_BYTES",
    "EncodeContext",
    "ModuleEncoder",
    "Piece",
    "Quantized",
    "Scheme",
    "Target",
    "TargetOptions",
    "TensorSpec",
    "encode_dense",
    "target_named",
    "target_names",
]
