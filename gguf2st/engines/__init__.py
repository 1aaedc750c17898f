"""What vLLM, SGLang and transformers accept: names, fused layers, matching rules, kernels."""

from gguf2st.engines.base import (
    Checkpoint,
    Deployment,
    Engine,
    EngineModule,
    Kind,
    Matrix,
    Outcome,
    Verdict,
)
from gguf2st.engines.check import contradictions, partners
from gguf2st.engines.rules import ENGINES, EngineRules, engine_named, quant_method, stacked

__all__ = [
    "ENGINES",
    "Checkpoint",
    "Deployment",
    "Engine",
    "EngineModule",
    "EngineRules",
    "Kind",
    "Matrix",
    "Outcome",
    "Verdict",
    "contradictions",
    "engine_named",
    "partners",
    "quant_method",
    "stacked",
]
