"""What is in the files."""

from gguf2st.gguf.container import GgufFile, TensorInfo
from gguf2st.gguf.metadata import Metadata
from gguf2st.gguf.model import GgufModel, GgufSource, open_model, open_source

__all__ = [
    "GgufFile",
    "GgufModel",
    "GgufSource",
    "Metadata",
    "TensorInfo",
    "open_model",
    "open_source",
]
