"""The functions of `quantize` for torch tensors, with the formulas of the compiled kernels.

Plain rounding gives the same codes and scales to the last bit. A search tries the same
candidates, but adds its sums up in another order, so it may settle a tie otherwise. Sums of
errors agree to about six digits.

`quantize`'s own functions call these when they are given a tensor; only then is torch imported.
"""

from gguf2st.quantize.device.floating import (
    quantize_fp8_blocks,
    quantize_fp8_rows,
    quantize_mxfp4,
    quantize_nvfp4,
)
from gguf2st.quantize.device.integer import dequantize_rows, quantize_rows
from gguf2st.quantize.device.packing import pack_awq, pack_nibbles, pack_rows

__all__ = [
    "dequantize_rows",
    "pack_awq",
    "pack_nibbles",
    "pack_rows",
    "quantize_fp8_blocks",
    "quantize_fp8_rows",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "quantize_rows",
]
