"""What was done, as typed data that prints as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


def printable(text: str) -> str:
    """The text on one line, with everything that could steer a terminal spelled out.

    Texts of a file may hold any bytes, and paths too.
    """
    return "".join(
        c
        if c.isprintable()
        else c.encode("unicode_escape", "surrogatepass").decode("ascii", "replace")
        for c in text
    )


@dataclass(frozen=True)
class ConversionReport:
    """A finished conversion (or, with `dry_run`, one that was only planned).

    Sizes are in bytes, `seconds` is wall time.
    """

    output: Path
    architecture: str
    model_class: str
    target: str
    tensors: int
    components: dict[str, int]
    source_types: dict[str, int]
    total_bytes: int
    source_bytes: int
    shards: int
    seconds: float
    peak_memory: int
    dropped: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def serve_command(self) -> str:
        """A command that serves the output with vLLM."""
        return f"vllm serve {self.output}"

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        content = asdict(self) | {"output": str(self.output), "serve_command": self.serve_command}
        return {"schema": SCHEMA, "kind": "conversion"} | content

    def to_text(self) -> str:
        """A short summary for people."""
        parts = ", ".join(f"{count} {name}" for name, count in self.components.items())
        types = ", ".join(f"{count} {name}" for name, count in self.source_types.items())
        lines = [
            f"{'would write' if self.dry_run else 'wrote'}  {self.output}",
            f"model        {self.model_class} ({self.architecture}): {self.tensors} tensors ({parts})",
            f"source       {_size(self.source_bytes)}: {types}",
            f"output       {_size(self.total_bytes)} of {self.target} in {self.shards} shard(s)",
        ]
        if self.dry_run:
            lines.append(f"memory       about {_size(self.peak_memory)} at the peak")
        else:
            lines.append(f"time         {self.seconds:.1f} s")
        if self.dropped:
            by_reason: dict[str, list[str]] = {}
            for name, reason in self.dropped:
                by_reason.setdefault(reason, []).append(name)
            for reason, names in by_reason.items():
                shown = ", ".join(names[:3]) + (
                    f" and {len(names) - 3} more" if len(names) > 3 else ""
                )
                lines.append(f"left out     {shown}: {reason}")
        lines += [f"differs      {text}" for text in self.differences]
        lines += [f"warning      {text}" for text in self.warnings]
        lines.append(f"serve        {self.serve_command}")
        return "\n".join(printable(line) for line in lines)


@dataclass(frozen=True)
class FileReport:
    """What is in a GGUF (all shards of it)."""

    path: Path
    role: str
    architecture: str
    version: int
    big_endian: bool
    name: str | None
    supported: bool
    files: list[str]
    size: int
    tensors: int
    parameters: int
    types: dict[str, tuple[int, int]]
    blocks: int | None
    mtp_layers: int
    context_length: int | None
    vision: str | None
    tokenizer: str | None
    vocabulary: int | None
    chat_template: bool

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {"schema": SCHEMA, "kind": "file"} | asdict(self) | {"path": str(self.path)}

    def to_text(self) -> str:
        """A summary for people."""
        order = "big-endian" if self.big_endian else "little-endian"
        lines = [
            f"file         {self.path}",
            f"format       GGUF version {self.version}, {order}, {_size(self.size)}"
            + (f" in {len(self.files)} shards" if len(self.files) > 1 else ""),
            f"holds        {_ROLES.get(self.role, self.role)}",
            f"architecture {self.architecture} ({'supported' if self.supported else 'not supported yet'})",
        ]
        if self.name:
            lines.append(f"name         {self.name}")
        lines.append(f"tensors      {self.tensors}, {self.parameters / 1e9:.3f} billion weights")
        lines += [
            f"             {kind:8} {count:5} tensors  {_size(size):>10}"
            for kind, (count, size) in self.types.items()
        ]
        if self.blocks is not None:
            lines.append(
                f"blocks       {self.blocks}"
                + (f" ({self.mtp_layers} MTP)" if self.mtp_layers else "")
            )
        if self.context_length:
            lines.append(f"context      {self.context_length:,} tokens")
        if self.vision:
            lines.append(f"vision       {self.vision}")
        if self.tokenizer:
            template = "with" if self.chat_template else "without"
            lines.append(
                f"tokenizer    {self.tokenizer}, {self.vocabulary:,} tokens, {template} chat template"
            )
        return "\n".join(printable(line) for line in lines)


_ROLES = {
    "model": "a language model",
    "mmproj": "a multimodal projector (mmproj), to be given with --mmproj",
    "mtp": "MTP blocks without their model, to be given with --mtp",
    "vocabulary": "a vocabulary without weights",
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
}


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
