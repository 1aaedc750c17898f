"""`gguf2st verify`."""

from pathlib import Path
from typing import Annotated

import typer

from gguf2st.cli.options import Capability, Checkpoint, Cpu, Engines, Json, Sizes
from gguf2st.cli.output import print_report
from gguf2st.cli.parsing import parse_engines, parse_sizes


def verify(
    directory: Checkpoint,
    engine: Engines = "all",
    tp: Sizes = "1",
    sm: Capability = None,
    cpu: Cpu = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the values, too, and not only headers.")
    ] = False,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Files may end before their data do.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="GGUF with which all values are compared.")
    ] = None,
    mmproj: Annotated[Path | None, typer.Option(help="Its vision projector.")] = None,
    mtp: Annotated[Path | None, typer.Option(help="Its separate MTP file.")] = None,
    as_json: Json = False,
) -> None:
    """Say whether vLLM, SGLang and transformers will load a checkpoint right; if not, end with 1."""
    from gguf2st.verification import verify as run  # noqa: PLC0415  # --help needn't wait for it

    report = run(
        directory,
        parse_engines(engine),
        tensor_parallel=parse_sizes(tp),
        compute_capability=sm,
        cpu=cpu,
        deep=deep,
        headers_only=headers_only,
        against=against,
        mmproj=mmproj,
        mtp=mtp,
    )
    print_report(report, as_json=as_json)
    if not report.right:
        raise typer.Exit(1)
