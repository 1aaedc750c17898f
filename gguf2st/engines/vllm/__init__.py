"""vLLM 0.32."""

from gguf2st.engines.vllm.engine import Vllm

__all__ = ["Vllm"]
