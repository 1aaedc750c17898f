"""Turn GGUF models into Hugging Face checkpoints that serving engines load as they are.

>>> import gguf2st
>>> report = gguf2st.convert("model.gguf", "out", mmproj="mmproj.gguf")  # doctest: +SKIP
>>> print(report.serve_command)  # doctest: +SKIP
vllm serve out
"""

from gguf2st.convert import Progress, convert
from gguf2st.errors import (
    Gguf2stError,
    InputError,
    OutputError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from gguf2st.gguf import GgufModel, GgufSource, open_model, open_source
from gguf2st.inspection import Supported, architectures, inspect
from gguf2st.plan import Plan, make_plan
from gguf2st.report import ConversionReport, FileReport

__all__ = [
    "ConversionReport",
    "FileReport",
    "Gguf2stError",
    "GgufModel",
    "GgufSource",
    "InputError",
    "OutputError",
    "Plan",
    "Progress",
    "Supported",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "architectures",
    "convert",
    "inspect",
    "make_plan",
    "open_model",
    "open_source",
]
