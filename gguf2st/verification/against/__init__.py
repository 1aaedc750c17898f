"""Compares a checkpoint with a GGUF, by what llama.cpp's converter does and not by what ours undid."""

from gguf2st.verification.against.comparison import compare
from gguf2st.verification.against.result import Comparison, Figures

__all__ = ["Comparison", "Figures", "compare"]
