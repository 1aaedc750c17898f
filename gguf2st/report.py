"""What was done, as typed data that prints as text and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf2st.plan import Plan, PlannedModule
    from gguf2st.run import Outcome

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
class ModuleReport:
    """One quantized matrix: where it came from and what it lost.

    `relative_rmse` is sqrt(sum (x - y)^2 / sum x^2); `weighted_gain` is the weighted
    squared error of plain round-to-nearest divided by that of the chosen fit (1: no
    better; None: the fit is exact). `largest_change` is the largest |x - y| / |x| of a lossless
    format, infinite where it found no exact codes. `measured` says whether an importance matrix had
    an entry for it.
    """

    name: str
    source: str
    scheme: str
    relative_rmse: float
    weighted_gain: float | None
    exact: bool
    measured: bool = False
    largest_change: float | None = None


@dataclass(frozen=True)
class ConversionReport:
    """A finished conversion (or, with `dry_run`, one that was only planned).

    Sizes are in bytes, `seconds` is wall time. `kept` lists matrices that a rule left
    unquantized, with the reason; `folds` counts the activations whose scale moved into weights.
    `rounded` are unquantized tensors that a lossless format rounded to float16. `imatrix_helps`
    where an importance matrix wasn't given and would make the output lose less.
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
    parameters: int
    shards: int
    seconds: float
    compile_seconds: float
    peak_memory: int
    schemes: dict[str, int] = field(default_factory=dict)
    modules: list[ModuleReport] = field(default_factory=list)
    folds: int = 0
    imatrix_helps: bool = False
    rounded: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    engines: tuple[str, ...] = ("vllm", "sglang", "hf")
    dry_run: bool = False

    @property
    def serve_command(self) -> str:
        """A command that serves the output, with vLLM where it loads that."""
        if "vllm" in self.engines:
            return f"vllm serve {self.output}"
        if "sglang" in self.engines:
            return f"python -m sglang.launch_server --model-path {self.output}"
        return f"transformers serve {self.output}"

    @property
    def bits_per_weight(self) -> float:
        """Bytes of the output for each weight of the model, in bits."""
        return 8 * self.total_bytes / max(1, self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        content = asdict(self) | {
            "output": str(self.output),
            "serve_command": self.serve_command,
            "bits_per_weight": self.bits_per_weight,
        }
        return {"schema": SCHEMA, "kind": "conversion"} | content

    def to_text(self) -> str:
        """A short summary for people."""
        parts = ", ".join(f"{count} {name}" for name, count in self.components.items())
        types = ", ".join(f"{count} {name}" for name, count in self.source_types.items())
        lines = [
            f"{'would write' if self.dry_run else 'wrote'}  {self.output}",
            f"model        {self.model_class} ({self.architecture}): {self.tensors} tensors ({parts})",
            f"source       {_size(self.source_bytes)}: {types}",
            f"output       {_size(self.total_bytes)} of {self.target} in {self.shards} shard(s), "
            f"{self.bits_per_weight:.2f} bits per weight",
        ]
        for scheme, count in self.schemes.items():
            lines.append(f"quantized    {count} matrices as {scheme}")
        lines += _by_reason("kept", self.kept)
        lines += _by_reason("rounded", [(name, _ROUNDED) for name in self.rounded])
        lines += self._measured()
        lines += self._errors()
        if self.dry_run:
            lines.append(f"memory       about {_size(self.peak_memory)} at the peak")
        else:
            compiling = f", {self.compile_seconds:.1f} s of them to compile kernels, this once"
            told = compiling if self.compile_seconds >= 0.1 else ""
            lines.append(f"time         {self.seconds:.1f} s{told}")
        lines += _by_reason("left out", self.dropped)
        lines += [f"differs      {text}" for text in self.differences]
        lines += [f"warning      {text}" for text in self.warnings]
        lines.append(f"serve        {self.serve_command}")
        return "\n".join(printable(line) for line in lines)

    def _measured(self) -> list[str]:
        """How many matrices an importance matrix has entries for, and a few of the others.

        Without one, what it would bring.
        """
        if self.imatrix_helps:
            return [_WITH_IMATRIX]
        others = [module.name for module in self.modules if not module.measured]
        if len(others) == len(self.modules):
            return []
        text = f"imatrix      {len(self.modules) - len(others)} of {len(self.modules)} matrices measured"
        if others:
            more = f" and {len(others) - 2} more" if len(others) > 2 else ""
            text += f"; not {', '.join(others[:2])}{more}"
        folds = f", {self.folds} activations scaled" if self.folds else ""
        return [text + folds]

    def _errors(self) -> list[str]:
        if not self.modules:
            return []
        ordered = sorted(self.modules, key=lambda module: -module.relative_rmse)
        middle = ordered[len(ordered) // 2].relative_rmse
        exact = sum(module.exact for module in ordered)
        changes = [m.largest_change for m in ordered if m.largest_change is not None]
        if len(changes) == len(ordered) and max(changes) < math.inf:
            text = f"values       {exact} of {len(ordered)} matrices exact"
            if exact < len(ordered):
                text += (
                    f"; in the others codes are exact and scales rounded once, which changes no value by more "
                    f"than {max(changes):.2e} of itself"
                )
            return [text]
        text = f"error        {middle:.4f} relative RMSE in the middle"
        if exact:
            text += f", {exact} of {len(ordered)} matrices exact"
        gains = sorted(m.weighted_gain for m in ordered if m.weighted_gain is not None)
        if gains and gains[-1] > 1:
            text += (
                f"; round-to-nearest has {gains[len(gains) // 2]:.2f} times the squared error "
                f"({gains[0]:.2f} to {gains[-1]:.2f})"
            )
        worst = ", ".join(f"{m.name} {m.relative_rmse:.4f}" for m in ordered[:3])
        return [text, f"worst        {worst}"]


_ROUNDED = "to float16, by 2^-11 of a value at most (by 2^-25 where it is below 2^-14)"
# Measured on two models, in groups of 32 to 128 columns (docs/quality.md).
_WITH_IMATRIX = (
    "imatrix      none; with the model's importance matrix (--imatrix FILE, published beside many GGUFs) "
    "4 bits lost about half as much in published models, at the same size"
)


def _by_reason(label: str, entries: list[tuple[str, str]]) -> list[str]:
    """One line for each reason, with a few of its names."""
    names: dict[str, list[str]] = {}
    for name, reason in entries:
        names.setdefault(reason, []).append(name)
    lines = []
    for reason, members in names.items():
        more = f" and {len(members) - 2} more" if len(members) > 2 else ""
        lines.append(f"{label:12} {', '.join(members[:2])}{more}: {reason}")
    return lines


def build_report(
    plan: Plan, outcome: Outcome, output: Path, *, seconds: float, dry_run: bool
) -> ConversionReport:
    """The report of a plan and what its run measured."""
    sources = plan.resolution.model.sources
    types: Counter[str] = Counter()
    for source in sources:
        types.update({kind: count for kind, (count, _) in source.type_histogram().items()})
    warnings = [
        *plan.warnings,
        *(
            f"tensor {name} has {count:,} values that aren't finite; the GGUF is damaged or its "
            "quantization failed"
            for name, count in outcome.broken.items()
        ),
        *_quantized_again(plan, outcome),
    ]
    return ConversionReport(
        output=output,
        architecture=plan.resolution.model.architecture,
        model_class=plan.model_class,
        target=plan.target.name,
        tensors=sum(plan.components().values()),
        components=plan.components(),
        source_types=dict(types),
        total_bytes=plan.total_bytes,
        source_bytes=sum(source.size for source in sources),
        parameters=plan.parameters,
        shards=len(plan.shards),
        seconds=seconds,
        compile_seconds=outcome.compile_seconds,
        peak_memory=plan.peak_memory,
        schemes=plan.schemes(),
        modules=[
            _module_report(plan, module, outcome) for module in plan.modules if outcome.errors
        ],
        folds=plan.folding.folds,
        imatrix_helps=plan.imatrix_helps,
        rounded=[t.recipe.name for t in plan.tensors if t.recipe.name in outcome.rounded],
        kept=[(kept.name, kept.reason) for kept in plan.kept],
        dropped=[(d.tensor.name, d.reason) for d in plan.resolution.dropped],
        warnings=warnings,
        differences=list(plan.differences),
        engines=plan.engines,
        dry_run=dry_run,
    )


def _quantized_again(plan: Plan, outcome: Outcome) -> list[str]:
    """Matrices that have the format's own codes in the GGUF and yet couldn't keep them."""
    names = [
        planned.module.name
        for planned in plan.modules
        if planned.module.name in outcome.errors
        and planned.module.name not in outcome.moved
        and planned.quantized.scheme.same_blocks in planned.module.stored_types()
        and outcome.errors[planned.module.name].squared
    ]
    if not names:
        return []
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return [
        f"{', '.join(names[:2])}{more}: {plan.target.name} in the GGUF already, but quantized again, because "
        "what engines join with it has other types or another factor, or its columns move"
    ]


def _module_report(plan: Plan, planned: PlannedModule, outcome: Outcome) -> ModuleReport:
    sums = outcome.errors[planned.module.name]
    return ModuleReport(
        name=planned.module.name,
        source=planned.module.source().tensor.kind.name,
        scheme=str(planned.quantized.scheme),
        relative_rmse=sums.relative_rmse,
        weighted_gain=sums.weighted_nearest / sums.weighted if sums.weighted else None,
        exact=sums.squared == 0.0,
        measured=planned.module.name in outcome.weighted,
        largest_change=sums.largest if plan.target.by_type else None,
    )


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
