"""The verdict on a checkpoint, as text of about one screen and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf2st.report import SCHEMA, printable
from gguf2st.verification.finding import Effect, Finding

if TYPE_CHECKING:
    from gguf2st.verification.against import Comparison

_ORDER = list(Effect)
_SHOWN = 2
_WIDTH = 100


class Loading(StrEnum):
    """What an engine does with a checkpoint."""

    LOADS = "loads"
    SLOWER = "loads, with a slower path"
    WRONG = "silently wrong"
    CRASHES = "crashes"


_OF_EFFECT = {
    Effect.SLOWER: Loading.SLOWER,
    Effect.WRONG: Loading.WRONG,
    Effect.CRASH: Loading.CRASHES,
}


@dataclass(frozen=True)
class EngineVerdict:
    """What becomes of the checkpoint in one engine; `message` is what a crash prints."""

    engine: str
    title: str
    loading: Loading
    message: str = ""

    @property
    def right(self) -> bool:
        """Whether the engine computes what the checkpoint holds."""
        return self.loading in (Loading.LOADS, Loading.SLOWER)


@dataclass(frozen=True)
class VerifyReport:
    """All that was found. `unchecked` says what couldn't be looked at, and why."""

    directory: Path
    model_class: str
    quantization: str
    tensors: int
    total_bytes: int
    files: int
    verdicts: tuple[EngineVerdict, ...]
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()
    headers_only: bool = False
    deep: bool = False
    against: Comparison | None = None

    @property
    def right(self) -> bool:
        """Whether every asked engine loads it right."""
        return all(verdict.right for verdict in self.verdicts)

    def of(self, rule: str) -> tuple[Finding, ...]:
        """Findings of one rule."""
        return tuple(finding for finding in self.findings if finding.rule == rule)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "schema": SCHEMA,
            "kind": "verification",
            "directory": str(self.directory),
            "model_class": self.model_class,
            "quantization": self.quantization,
            "tensors": self.tensors,
            "total_bytes": self.total_bytes,
            "files": self.files,
            "right": self.right,
            "verdicts": [asdict(verdict) | {"right": verdict.right} for verdict in self.verdicts],
            "findings": [asdict(f) | {"count": len(f.subjects)} for f in self.findings],
            "unchecked": list(self.unchecked),
            "headers_only": self.headers_only,
            "deep": self.deep,
            "against": self.against.to_dict() if self.against is not None else None,
        }

    def to_text(self) -> str:
        """The verdicts, then each finding with its reason and its remedy."""
        what = f"{self.model_class or 'unknown class'}, {self.quantization or 'not quantized'}"
        size = f"{self.tensors} tensors, {self.total_bytes / 1e9:.2f} GB in {self.files} file(s)"
        lines = [
            f"checkpoint   {self.directory}",
            f"holds        {what}, {size}{', headers only' if self.headers_only else ''}",
        ]
        for verdict in self.verdicts:
            lines.append(f"{verdict.title:12} {verdict.loading}")
            if verdict.message:
                lines += _wrapped(f'the user sees "{verdict.message}"', " " * 13)
        if self.against is not None:
            lines += self.against.lines()
        for findings in _alike(self.findings):
            lines += self._described(findings)
        unchecked = (*self.unchecked, *(self.against.left_out if self.against is not None else ()))
        lines += [line for text in unchecked for line in _wrapped(text, "unchecked    ")]
        return "\n".join(printable(line) for line in lines)

    def _described(self, findings: Sequence[Finding]) -> list[str]:
        titles = {verdict.engine: verdict.title for verdict in self.verdicts}
        by_effect: dict[Effect, list[str]] = {}
        for finding in findings:
            by_effect.setdefault(finding.effect, []).append(titles.get(finding.engine, "all"))
        effects = "; ".join(f"{effect} in {', '.join(t)}" for effect, t in by_effect.items())
        first = findings[0]
        lines = ["", f"{first.rule:12} {effects.replace(' in all', '')}"]
        lines += _wrapped(f"{_some(first.subjects)}{first.reason}", " " * 13)
        if first.remedy.text:
            lines += _wrapped(first.remedy.text, " " * 10 + "-> ")
        return lines


def _some(subjects: Sequence[str]) -> str:
    if not subjects:
        return ""
    more = f" and {len(subjects) - _SHOWN} more" if len(subjects) > _SHOWN else ""
    return f"{', '.join(subjects[:_SHOWN])}{more}: "


def _wrapped(text: str, label: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that differ in the engine alone stand together; the worst come first."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.reason, finding.subjects), []).append(finding)
    return sorted(
        groups.values(), key=lambda group: -max(_ORDER.index(finding.effect) for finding in group)
    )


def verdict_on(engine: str, title: str, findings: Sequence[Finding]) -> EngineVerdict:
    """The worst of what was found for an engine."""
    mine = [f for f in findings if f.engine in ("", engine)]
    worst = max((f.effect for f in mine), key=_ORDER.index, default=Effect.NOTE)
    message = next((f.message for f in mine if f.effect is worst and f.message), "")
    return EngineVerdict(engine, title, _OF_EFFECT.get(worst, Loading.LOADS), message)
