"""SGLang 0.5.23."""

from gguf2st.engines.sglang.engine import SgLang

__all__ = ["SgLang"]
