"""Rules over any checkpoint directory: what engines will make of what lies on disk."""

from gguf2st.verification import rules as _rules
from gguf2st.verification.checkpoint import CheckpointView, open_checkpoint
from gguf2st.verification.context import Context, LayerReading
from gguf2st.verification.finding import RULES, Effect, Finding, Mend, Remedy, Rule
from gguf2st.verification.report import EngineVerdict, Loading, VerifyReport
from gguf2st.verification.runner import verify, verify_view

__all__ = [
    "RULES",
    "CheckpointView",
    "Context",
    "Effect",
    "EngineVerdict",
    "Finding",
    "LayerReading",
    "Loading",
    "Mend",
    "Remedy",
    "Rule",
    "VerifyReport",
    "open_checkpoint",
    "verify",
    "verify_view",
]
del _rules
