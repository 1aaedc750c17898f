"""transformers 5.19."""

from gguf2st.engines.hf.engine import Transformers

__all__ = ["Transformers"]
