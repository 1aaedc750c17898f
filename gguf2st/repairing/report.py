"""What was mended, and what can't be: as text of about one screen and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gguf2st.repairing.mends import Change
from gguf2st.repairing.plan import RepairPlan
from gguf2st.report import SCHEMA, printable
from gguf2st.verification import Finding, Mend

_SHOWN = 2
_WIDTH = 100
_LONGEST_VALUE = 70
_LABELS = {
    Mend.DEQUANTIZE: "dequantized",
    Mend.MATCH: "matched",
    Mend.CONFIG: "config",
    Mend.INDEX: "index",
    Mend.RENAME: "renamed",
    Mend.CAST: "cast",
    Mend.MISSING: "added",
    Mend.DROP: "left out",
}


@dataclass(frozen=True)
class RepairReport:
    """A repair that was done, only planned (`dry_run`), or can't be done.

    `files` says how many were rewritten, linked, reflinked and copied; none when nothing was written.
    """

    plan: RepairPlan
    output: Path
    files: Mapping[str, int] = field(default_factory=dict)
    dry_run: bool = False
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether every asked engine loads the output right; otherwise nothing was written."""
        return self.plan.right

    @property
    def written(self) -> bool:
        """Whether there is an output."""
        return self.right and not self.dry_run

    @property
    def dequantized(self) -> tuple[str, ...]:
        """Modules that aren't quantized any more."""
        return self.plan.of(Mend.DEQUANTIZE)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        plan = self.plan
        return {
            "schema": SCHEMA,
            "kind": "repair",
            "directory": str(plan.directory),
            "output": str(self.output),
            "right": self.right,
            "written": self.written,
            "dry_run": self.dry_run,
            "changes": [asdict(change) for change in plan.changes],
            "config_changes": [
                {"key": key, "old": old, "new": new}
                for key, (old, new) in plan.config_changes.items()
            ],
            "documents": dict(plan.documents),
            "rewritten": [
                {
                    "file": shard.file,
                    "bytes": shard.nbytes,
                    "tensors": [
                        {
                            "name": tensor.name,
                            "dtype": tensor.dtype,
                            "shape": list(tensor.shape),
                            "from": type(tensor.source).__name__.lower(),
                        }
                        for tensor in shard.tensors
                    ],
                }
                for shard in plan.shards
            ],
            "kept": list(plan.kept),
            "left_out": list(plan.left_out),
            "refused": dict(plan.refused),
            "assumptions": list(plan.assumptions),
            "before": plan.before.to_dict(),
            "after": plan.after.to_dict(),
            "files": dict(self.files),
            "seconds": self.seconds,
        }

    def to_text(self) -> str:
        """What changes, then the verdicts and what is left."""
        plan = self.plan
        verb = "would write" if self.dry_run else "wrote" if self.written else "not written"
        lines = [f"{verb:12} {self.output}", f"from         {plan.directory}"]
        if not plan.changes and self.right:
            lines.append("mended       nothing needs to be")
        for what, label in _LABELS.items():
            for change in plan.changes:
                if change.what is what:
                    lines += _described(label, change)
        lines += self._config()
        lines += [line for text in plan.assumptions for line in _wrapped(text, "assumed      ")]
        lines += self._files() if self.right else []
        for verdict in plan.after.verdicts:
            was = next(v for v in plan.before.verdicts if v.engine == verdict.engine)
            before = "" if was.loading is verdict.loading else f" (was: {was.loading})"
            lines.append(f"{verdict.title:12} {verdict.loading}{before}")
        lines += self._left()
        return "\n".join(printable(line) for line in lines)

    def _config(self) -> Iterator[str]:
        for key, (old, new) in self.plan.config_changes.items():
            yield from _wrapped(f"{key}: {_short(old)} -> {_short(new)}", "config.json  ")

    def _files(self) -> Iterator[str]:
        plan = self.plan
        for shard in plan.shards:
            same = sum(type(tensor.source).__name__ == "Copied" for tensor in shard.tensors)
            yield (
                f"rewritten    {shard.file}: {shard.nbytes / 1e9:.2f} GB, {same} of "
                f"{len(shard.tensors)} tensors copied as they are"
            )
        if plan.kept:
            how = ", ".join(f"{n} {what}" for what, n in self.files.items() if what != "rewritten")
            yield f"kept         {len(plan.kept)} safetensors file(s)" + (
                f"; of all files {how}" if how else ""
            )

    def _left(self) -> Iterator[str]:
        plan = self.plan
        if self.right:
            return
        yield ""
        groups: dict[tuple[str, str, tuple[str, ...]], Finding] = {}
        for finding in plan.left:
            groups.setdefault((finding.rule, finding.reason, finding.subjects), finding)
        for finding in groups.values():
            yield from _wrapped(
                f"{_some(finding.subjects)}{finding.reason}", f"{'no ' + finding.rule:12} "
            )
            if finding.remedy.text:
                yield from _wrapped(finding.remedy.text, " " * 10 + "-> ")
        for name, reason in plan.refused.items():
            yield from _wrapped(f"{name}: {reason}", "can't        ")
        good = [verdict.engine for verdict in plan.after.verdicts if verdict.right]
        if good and not plan.refused:
            yield from _wrapped(
                f"for {' and '.join(good)} alone nothing is in the way: --engine {','.join(good)}",
                " " * 10 + "-> ",
            )


def _described(label: str, change: Change) -> list[str]:
    rule = f" ({change.rule})" if change.rule else ""
    return _wrapped(f"{_some(change.subjects)}{change.reason}{rule}", f"{label:12} ")


def _some(subjects: Sequence[str]) -> str:
    if not subjects:
        return ""
    more = f" and {len(subjects) - _SHOWN} more" if len(subjects) > _SHOWN else ""
    return f"{', '.join(subjects[:_SHOWN])}{more}: "


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 4]} ..."


def _wrapped(text: str, label: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
