"""What a comparison found: figures of every tensor, findings, and what wasn't compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gguf2st.verification.finding import Finding

if TYPE_CHECKING:
    from gguf2st.gguf import TensorInfo
    from gguf2st.verification.against.forward import Item
    from gguf2st.verification.against.measuring import Agreement, Measure
    from gguf2st.verification.against.places import Place

_SHOWN = 5


@dataclass(frozen=True)
class Pair:
    """A place and its counterpart. `measure` is None where shapes differ, and for norms whose
    scales were moved back."""

    place: Place
    item: Item
    tensor: TensorInfo
    measure: Measure | None
    agreement: Agreement


@dataclass(frozen=True)
class Figures:
    """Of one tensor, or one expert of a stack.

    `error` is the root mean square of the difference by that of the GGUF's values, `bound` what
    the checkpoint's number format explains of it, `worst_row` the largest error of a row by that row,
    `beyond` how many values are farther away than half a step. `kind` is the GGUF's block type,
    `scheme` the checkpoint's. None: there is nothing to compare value by value.
    """

    name: str
    gguf: str
    component: str
    kind: str
    scheme: str
    values: int
    error: float | None
    bound: float | None
    worst_row: float | None
    beyond: int | None
    agreement: str

    @property
    def share(self) -> float:
        """The error in units of the bound."""
        if not self.error:
            return 0.0
        return self.error / self.bound if self.bound else float("inf")


@dataclass(frozen=True)
class Comparison:
    """A checkpoint compared with a GGUF. `left_out` says what wasn't, and why."""

    path: str
    figures: tuple[Figures, ...]
    findings: tuple[Finding, ...]
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON data."""
        return {
            "path": self.path,
            "agreement": dict(Counter(f.agreement for f in self.figures)),
            "components": dict(Counter(f.component for f in self.figures)),
            "tensors": [asdict(f) for f in self.figures],
            "left_out": list(self.left_out),
        }

    def lines(self) -> list[str]:
        """Counts, and a table of the tensors with the largest errors for their formats."""
        counts = Counter(f.agreement for f in self.figures)
        parts = Counter(f.component for f in self.figures)
        summary = ", ".join(f"{number} {agreement}" for agreement, number in counts.most_common())
        of = ", ".join(f"{part} {number}" for part, number in parts.items())
        lines = [f"against      {self.path}", f"compared     {of or 'nothing'}: {summary or '-'}"]
        measured = [f for f in self.figures if f.error is not None]
        worst = sorted(measured, key=lambda f: -f.share)[:_SHOWN]
        if worst:
            lines.append("                error     bound  worst row  tensor")
        for f in worst:
            lines.append(
                f"             {f.error:8.5f}  {f.bound:8.5f}   {f.worst_row:8.5f}  {f.name}"
            )
        return lines
