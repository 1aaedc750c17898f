"""Which format would work where one is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gguf2st.errors import UnsupportedError, UsageError
from gguf2st.mapping import Resolution
from gguf2st.options import PlanOptions
from gguf2st.selection import Selection, as_read
from gguf2st.targets import TargetOptions, target_named

# By what most users want first.
_CANDIDATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("awq", {}),
    ("ct", {}),
    ("ct", {"bits": 8}),
    ("gptq", {}),
    ("fp8", {}),
    ("fp8", {"variant": "block"}),
    ("mxfp4", {}),
)


def working_choice(resolution: Resolution, options: PlanOptions) -> str:
    """Flags of the first format that the same engines take of a model, such as "--to ct --bits 8"."""
    if target_named(options.to, options.target).by_type:
        return "--to bf16"  # whoever wants to lose nothing
    for to, choices in _CANDIDATES:
        if to in (options.to, {"compressed-tensors": "ct"}.get(options.to)) and not choices:
            continue
        other = replace(
            options,
            to=to,
            target=TargetOptions(**choices),
            keep=(),
            quantize=(),
            activation_scales=None,
            quality=None,
            bits_per_weight=None,
        )
        try:
            target = as_read(target_named(to, other.target), other, resolution)
            selection = Selection(resolution, target, other)
        except (UnsupportedError, UsageError):
            continue
        if selection.modules:
            flags = " ".join(f"--{name} {value}" for name, value in choices.items())
            return f"--to {to} {flags}".strip()
    return "--to bf16"
