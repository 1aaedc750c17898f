"""The numbers: grids, scale search, packing, importance weights."""

from gguf2st.quantize.errors import ErrorSums, ScaleRangeError
from gguf2st.quantize.exact import exact_rows
from gguf2st.quantize.floating import (
    Fp4Rows,
    Fp8Rows,
    nvfp4_block_errors,
    nvfp4_global_scale,
    nvfp4_global_scale_of,
    quantize_fp8_blocks,
    quantize_fp8_rows,
    quantize_mxfp4,
    quantize_nvfp4,
)
from gguf2st.quantize.imatrix import read_importance
from gguf2st.quantize.integer import IntegerGrid, IntegerRows, dequantize_rows, quantize_rows
from gguf2st.quantize.packing import (
    pack_awq,
    pack_gptq,
    pack_gptq_zeros,
    pack_nibbles,
    pack_rows,
    pack_zeros_down,
)

__all__ = [
    "ErrorSums",
    "Fp4Rows",
    "Fp8Rows",
    "IntegerGrid",
    "IntegerRows",
    "ScaleRangeError",
    "dequantize_rows",
    "exact_rows",
    "nvfp4_block_errors",
    "nvfp4_global_scale",
    "nvfp4_global_scale_of",
    "pack_awq",
    "pack_gptq",
    "pack_gptq_zeros",
    "pack_nibbles",
    "pack_rows",
    "pack_zeros_down",
    "quantize_fp8_blocks",
    "quantize_fp8_rows",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "quantize_rows",
    "read_importance",
]
