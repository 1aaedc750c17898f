"""Output formats."""

from gguf2st.targets import dense as _dense  # noqa: F401  # registers itself
from gguf2st.targets.base import DTYPE_BYTES, Target, TensorSpec, target_named, target_names

__all__ = ["DTYPE_BYTES", "Target", "TensorSpec", "target_named", "target_names"]
