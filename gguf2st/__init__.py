"""Turn GGUF models into Hugging Face checkpoints that serving engines load as they are.

>>> import gguf2st
>>> report = gguf2st.convert("model.gguf", "out", mmproj="mmproj.gguf")  # doctest: +SKIP
>>> print(report.serve_command)  # doctest: +SKIP
vllm serve out
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf2st.conversion import convert
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
    from gguf2st.options import PlanOptions
    from gguf2st.plan import Plan, make_plan
    from gguf2st.repairing import RepairPlan, RepairReport, repair
    from gguf2st.report import ConversionReport, FileReport, ModuleReport
    from gguf2st.run import Progress
    from gguf2st.targets import TargetOptions
    from gguf2st.verification import Finding, VerifyReport, verify

# Importing numpy and numba takes longer than `gguf2st --help` should: a module is imported when
# one of its names is first used.
_HOMES = {
    "gguf2st.conversion": ("convert",),
    "gguf2st.errors": (
        "Gguf2stError",
        "InputError",
        "OutputError",
        "UnsupportedError",
        "UsageError",
        "VerificationError",
    ),
    "gguf2st.gguf": ("GgufModel", "GgufSource", "open_model", "open_source"),
    "gguf2st.inspection": ("Supported", "architectures", "inspect"),
    "gguf2st.options": ("PlanOptions",),
    "gguf2st.plan": ("Plan", "make_plan"),
    "gguf2st.repairing": ("RepairPlan", "RepairReport", "repair"),
    "gguf2st.report": ("ConversionReport", "FileReport", "ModuleReport"),
    "gguf2st.run": ("Progress",),
    "gguf2st.targets": ("TargetOptions",),
    "gguf2st.verification": ("Finding", "VerifyReport", "verify"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ConversionReport",
    "FileReport",
    "Finding",
    "Gguf2stError",
    "GgufModel",
    "GgufSource",
    "InputError",
    "ModuleReport",
    "OutputError",
    "Plan",
    "PlanOptions",
    "Progress",
    "RepairPlan",
    "RepairReport",
    "Supported",
    "TargetOptions",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "VerifyReport",
    "architectures",
    "convert",
    "inspect",
    "make_plan",
    "open_model",
    "open_source",
    "repair",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
