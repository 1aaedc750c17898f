"""The smallest rewrite of a checkpoint that mends what was found, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf2st.repairing.draft import Copied, PlannedShard, drafted
from gguf2st.repairing.mends import Change, Mender
from gguf2st.verification import CheckpointView, Finding, Mend, VerifyReport, verify_view
from gguf2st.verification.checkpoint import INDEX
from gguf2st.verification.finding import ALL_ENGINES

# Each round mends something for good; no checkpoint is wrong in so many ways.
_MOST_ROUNDS = 24


@dataclass(frozen=True)
class Request:
    """Whom the output shall suit; as the arguments of `verify`. `tied` as for `repair`."""

    engines: tuple[str, ...] = ALL_ENGINES
    tensor_parallel: tuple[int, ...] = (1,)
    compute_capability: int | None = None
    cpu: bool = False
    tied: bool = False

    def judge(self, view: CheckpointView) -> VerifyReport:
        """What `verify` says of a view."""
        return verify_view(
            view,
            self.engines,
            tensor_parallel=self.tensor_parallel,
            compute_capability=self.compute_capability,
            cpu=self.cpu,
        )


@dataclass(frozen=True)
class RepairPlan:
    """What will be written. `before` and `after` are the verdicts on the input and on the output.

    `shards` are the safetensors files to be rewritten, `kept` those that stay as they are,
    `left_out` files that don't come along. `documents` are JSON files with their new content.
    `refused` are reasons why something can't be mended, by module or file.
    """

    directory: Path
    shards: tuple[PlannedShard, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    documents: Mapping[str, Any]
    changes: tuple[Change, ...]
    before: VerifyReport
    after: VerifyReport
    refused: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    config_changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether every asked engine loads the output right."""
        return self.after.right and not self.refused.get(INDEX)

    @property
    def rewritten_bytes(self) -> int:
        """Bytes of the files to be rewritten."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def copied_tensors(self) -> int:
        """Tensors of rewritten files whose bytes stay the same."""
        return sum(isinstance(t.source, Copied) for shard in self.shards for t in shard.tensors)

    @property
    def left(self) -> tuple[Finding, ...]:
        """What an engine still stumbles over."""
        return tuple(finding for finding in self.after.findings if finding.fatal)

    def of(self, what: Mend) -> tuple[str, ...]:
        """Subjects of all changes of a kind."""
        found = [name for change in self.changes if change.what is what for name in change.subjects]
        return tuple(dict.fromkeys(found))


def make_repair_plan(view: CheckpointView, request: Request) -> RepairPlan:
    """Mend what `verify` finds, until it finds nothing more that can be mended."""
    mender = Mender(drafted(view), request.engines, request.tied)
    lost = _lost(view)
    before = report = request.judge(view)
    # Nothing can be said of tensors whose header is damaged.
    damaged = any(header.problems for header in view.headers)
    for _ in range(0 if damaged else _MOST_ROUNDS):
        if not mender.apply(report.findings):
            break
        report = request.judge(mender.draft.view())
    draft = mender.draft
    refused = dict(mender.problems)
    if lost:
        refused[INDEX] = f"names {lost[0]} and {len(lost) - 1} more, whose files aren't there"
    return RepairPlan(
        directory=view.directory,
        shards=tuple(draft.laid_out(file) for file in draft.files() if not draft.unchanged(file)),
        kept=tuple(file for file in draft.files() if draft.unchanged(file)),
        left_out=tuple(
            sorted(draft.left_out | {file for file in draft.shards if file not in draft.files()})
        ),
        documents=draft.documents(),
        changes=tuple(mender.changes),
        before=before,
        after=report,
        refused=refused,
        assumptions=tuple(mender.assumptions),
        config_changes=dict(_differences(view.config, draft.config or {})),
    )


def _lost(view: CheckpointView) -> list[str]:
    """Tensors that the index places in files that aren't there, and that no other file has."""
    held = {name for header in (*view.headers, *view.strays) for name in header.tensors}
    places = view.weight_map or {}
    return [n for n, file in places.items() if file not in view.files and n not in held]


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Dotted keys with their old and new values; None where there is none."""
    for key in dict.fromkeys([*old, *new]):
        one, other = old.get(key), new.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(one, other, f"{path}{key}.")
        elif one != other:
            yield f"{path}{key}", (one, other)
