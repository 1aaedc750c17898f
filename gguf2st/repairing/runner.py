"""Repairing a checkpoint: look, plan, write, look again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from gguf2st.checkpoint.writer import appearing_directory, check_output
from gguf2st.errors import InputError, OutputError, VerificationError
from gguf2st.repairing.plan import RepairPlan, Request, make_repair_plan
from gguf2st.repairing.report import RepairReport
from gguf2st.repairing.writing import needed_bytes, write
from gguf2st.verification import open_checkpoint, verify
from gguf2st.verification.finding import ALL_ENGINES


def repair(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    engines: Sequence[str] = ALL_ENGINES,
    tensor_parallel: Sequence[int] = (1,),
    compute_capability: int | None = None,
    cpu: bool = False,
    tied: bool = False,
    dry_run: bool = False,
    force: bool = False,
) -> RepairReport:
    """Write a checkpoint that engines load right, from one that they don't, with the smallest rewrite.

    What `verify` finds for `engines` is mended: modules that an engine can't take quantized become
    16-bit floats, names, config.json and the index are made to agree with the tensors. Weights of
    unchanged files are hard-linked where the file system allows, all other tensors are copied
    byte by byte; the input is never changed. The output appears under its name when it is complete
    and verified. Where something can't be mended nothing is written, and `right` of the report is
    False. `tied` says that the model's head is its embedding: a head that is missing is lost otherwise,
    unless a part of config.json says it.

    Raises `UsageError` for an unknown engine, `InputError` for a directory that holds no checkpoint
    or has only headers, `OutputError` where the output can't be written or would replace the input.
    """
    started = time.monotonic()
    source, final = Path(directory), Path(output)
    _check_apart(source, final)
    check_output(final, force=force or dry_run)
    request = Request(tuple(engines), tuple(tensor_parallel), compute_capability, cpu, tied)
    view = open_checkpoint(source)
    plan = make_repair_plan(view, request)
    counts: dict[str, int] = {}
    if plan.right and not dry_run:
        if view.headers_only:
            raise InputError(
                f"{source} has files that end behind their headers, so there are no weights to write; "
                "fetch them whole, or use --dry-run."
            )
        with appearing_directory(
            final, force=force, needed_bytes=needed_bytes(plan, final)
        ) as partial:
            counts = write(plan, partial)
            _check(plan, partial, request)
    return RepairReport(
        plan=plan,
        output=final,
        files=counts,
        dry_run=dry_run,
        seconds=time.monotonic() - started,
    )


def _check_apart(source: Path, final: Path) -> None:
    """The output is neither the input, nor in it, nor around it."""
    one, other = source.resolve(), final.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise OutputError(
            f"{final} is, holds or lies in {source}, which is never changed; choose another place with -o."
        )


def _check(plan: RepairPlan, directory: Path, request: Request) -> None:
    """Apply the rules to what was written. Raises `VerificationError`."""
    report = verify(
        directory,
        request.engines,
        tensor_parallel=request.tensor_parallel,
        compute_capability=request.compute_capability,
        cpu=request.cpu,
    )
    for finding in report.findings:
        if finding.fatal:
            raise VerificationError(
                f"the output wouldn't load right ({finding.rule}): "
                f"{', '.join(finding.subjects[:1])}: {finding.reason}; please report this."
            )
