"""`gguf2st repair`."""

from pathlib import Path
from typing import Annotated

import typer

from gguf2st.cli.options import Capability, Checkpoint, Cpu, Engines, Json, Sizes
from gguf2st.cli.output import print_report
from gguf2st.cli.parsing import parse_engines, parse_sizes


def repair(
    directory: Checkpoint,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory to write.", show_default=False)
    ],
    engine: Engines = "all",
    tp: Sizes = "1",
    sm: Capability = None,
    cpu: Cpu = False,
    tied: Annotated[
        bool, typer.Option("--tied", help="A head that is missing is known to be the embedding.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, but write nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing checkpoint directory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Mend what verify finds, with the smallest rewrite; end with 1 where that can't be done."""
    from gguf2st.repairing import repair as run  # noqa: PLC0415  # --help needn't wait for it

    report = run(
        directory,
        output,
        engines=parse_engines(engine),
        tensor_parallel=parse_sizes(tp),
        compute_capability=sm,
        cpu=cpu,
        tied=tied,
        dry_run=dry_run,
        force=force,
    )
    print_report(report, as_json=as_json)
    if not report.right:
        raise typer.Exit(1)
