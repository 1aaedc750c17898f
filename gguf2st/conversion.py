"""Converting a model: open, plan, run, check, report."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gguf2st.checkpoint.original import TOKENIZER_FILES, original_directory
from gguf2st.checkpoint.writer import appearing_directory, check_output
from gguf2st.errors import VerificationError
from gguf2st.gguf import open_model
from gguf2st.gpu import open_gpu
from gguf2st.options import PlanOptions
from gguf2st.plan import Plan, make_plan
from gguf2st.quantize.activation_scales import read_activation_scales
from gguf2st.quantize.imatrix import read_importance
from gguf2st.report import ConversionReport, build_report
from gguf2st.run import Outcome, ProgressCallback, run
from gguf2st.verification import verify

# More hardly help: the disk is busy with four, and without a search with one (docs/speed.md).
DEFAULT_THREADS = min(
    4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)

PathLike = str | os.PathLike[str]


def convert(
    model: PathLike,
    output: PathLike | None = None,
    *,
    mmproj: PathLike | None = None,
    mtp: PathLike | None = None,
    drop_mtp: bool = False,
    imatrix: PathLike | None = None,
    activation_scales: PathLike | None = None,
    tokenizer_from: PathLike | None = None,
    config_from: PathLike | None = None,
    options: PlanOptions | None = None,
    dry_run: bool = False,
    force: bool = False,
    progress: ProgressCallback | None = None,
    **choices: Any,
) -> ConversionReport:
    """Convert a GGUF model to a Hugging Face directory.

    `model` is a GGUF file or any shard of a split one; `mmproj` and `mtp` are the
    files that belong to it, `drop_mtp` leaves MTP blocks out. `output` defaults to a
    directory named after the model and the format. `imatrix` is an importance matrix
    that weights the quantization error, `activation_scales` a file of static scales for
    formats that need them. `tokenizer_from` and `config_from` are
    directories (or hub names) of the original. `choices` are fields of `PlanOptions`
    (`to="awq"`, `tensor_parallel=(1, 2)`, ...), which can also be given whole as
    `options`. `progress` is called from worker threads, one call at a time.

    Raises subclasses of `Gguf2stError`; whatever is raised, nothing is left behind.
    """
    started = time.monotonic()
    options = replace(options or PlanOptions(threads=DEFAULT_THREADS), **choices)
    open_gpu(options.device)  # without one, say so at once
    opened = open_model(model, mmproj, mtp)
    if drop_mtp:
        opened = opened.without_mtp()
    final = (
        Path(output) if output is not None else Path(f"{opened.language.path.stem}-{options.to}")
    )
    check_output(final, force=force or dry_run)
    if tokenizer_from is not None:
        options = replace(
            options, tokenizer_from=original_directory(tokenizer_from, TOKENIZER_FILES)
        )
    if config_from is not None:
        options = replace(options, config_from=original_directory(config_from, ("config.json",)))
    if imatrix is not None:
        options = replace(options, importance=read_importance(imatrix))
    if activation_scales is not None:
        options = replace(options, activation_scales=read_activation_scales(activation_scales))
    plan = make_plan(opened, options)
    outcome = Outcome()
    if not dry_run:
        with appearing_directory(final, force=force, needed_bytes=plan.total_bytes) as partial:
            outcome = run(plan, partial, progress)
            check_written(plan, partial)
            check_loading(plan, partial)
    return build_report(plan, outcome, final, seconds=time.monotonic() - started, dry_run=dry_run)


def check_loading(plan: Plan, directory: Path) -> None:
    """Apply the rules of `verify`, which share nothing with the plan, to what was written.

    Raises `VerificationError` with the worst that they find for an engine of the plan.
    """
    report = verify(
        directory,
        plan.engines,
        tensor_parallel=plan.options.tensor_parallel,
        compute_capability=plan.options.compute_capability,
    )
    for finding in report.findings:
        if finding.fatal:
            titles = {verdict.engine: verdict.title for verdict in report.verdicts}
            others = f" and {len(finding.subjects) - 1} more" if len(finding.subjects) > 1 else ""
            raise VerificationError(
                f"{titles.get(finding.engine, 'no engine')} wouldn't load the output right "
                f"({finding.rule}): {', '.join(finding.subjects[:1])}{others}: {finding.reason}; "
                "please report this."
            )


def check_written(plan: Plan, directory: Path) -> None:
    """Read the shards' headers back with safetensors' own reader and compare them with the plan.

    Raises `VerificationError` naming the first tensor that differs.
    """
    expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        s.file_name: {} for s in plan.shards
    }
    for placement in plan.placements:
        spec = placement.spec
        expected[plan.shards[placement.shard].file_name][spec.name] = (spec.dtype, spec.shape)
    for name, tensors in expected.items():
        try:
            with safe_open(directory / name, framework="np") as shard:
                slices = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118
                found = {key: (s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
        except (SafetensorError, OSError) as error:
            raise VerificationError(
                f"{name} can't be read back ({error}); please report this."
            ) from error
        for key in found.keys() ^ tensors.keys():
            raise VerificationError(f"tensor {key} of {name} isn't as planned; please report this.")
        for key, value in tensors.items():
            if found[key] != value:
                raise VerificationError(
                    f"tensor {key} of {name} is {found[key]}, planned {value}; please report this."
                )
