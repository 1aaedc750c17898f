"""The command line: parse, call the library, print its report."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguf2st.errors import Gguf2stError, UsageError

if TYPE_CHECKING:
    from gguf2st.convert import Progress

app = typer.Typer(
    help="Turn GGUF models into Hugging Face checkpoints that vLLM, SGLang and transformers load as they are.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}

Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 2GiB. Raises `UsageError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise UsageError(f"{text!r} isn't a size; write for example 5GB or 500MB.")
    return int(float(found[1]) * unit)


def _print(report: Any, *, as_json: bool) -> None:
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else report.to_text())


class _Bar:
    """One progress bar by bytes on standard error; absent when that isn't a terminal."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden or not sys.stderr.isatty()
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._hidden:
            return
        if self._bar is None:
            from tqdm import tqdm  # noqa: PLC0415  # only when there is something to show

            self._bar = tqdm(total=progress.total_bytes, unit="B", unit_scale=True, file=sys.stderr)
        self._bar.update(progress.done_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@app.command()
def convert(
    model: Annotated[
        Path, typer.Argument(help="A GGUF file, or any shard of a split one.", show_default=False)
    ],
    mmproj: Annotated[
        Path | None, typer.Option(help="The vision projector that belongs to the model.")
    ] = None,
    mtp: Annotated[
        Path | None, typer.Option(help="A separate file with the model's MTP blocks.")
    ] = None,
    to: Annotated[str, typer.Option(help="Output format: bf16, f16 or f32.")] = "bf16",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Directory to write; default: MODEL-FORMAT."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan and report, but write nothing.")
    ] = False,
    as_json: Json = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing checkpoint directory.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest shard, such as 5GB.")] = "5GB",
    tokenizer_from: Annotated[
        str | None, typer.Option(help="Directory (or hub name) of the original tokenizer.")
    ] = None,
    config_from: Annotated[
        str | None, typer.Option(help="Directory (or hub name) of the original config.json.")
    ] = None,
    mappings: Annotated[
        Path | None,
        typer.Option(help="Directory of mapping tables to use instead of the shipped ones."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Workers; default: up to 4.")] = None,
) -> None:
    """Convert a model, with its projector and MTP blocks, to a Hugging Face directory."""
    from gguf2st.convert import DEFAULT_THREADS  # noqa: PLC0415  # --help shouldn't wait for numpy
    from gguf2st.convert import convert as run  # noqa: PLC0415

    bar = _Bar(hidden=dry_run)
    try:
        report = run(
            model,
            output,
            mmproj=mmproj,
            mtp=mtp,
            to=to,
            dry_run=dry_run,
            force=force,
            max_shard_bytes=parse_size(max_shard_size),
            tokenizer_from=tokenizer_from,
            config_from=config_from,
            mappings=mappings,
            threads=threads or DEFAULT_THREADS,
            progress=bar,
        )
    finally:
        bar.close()
    _print(report, as_json=as_json)


@app.command()
def inspect(
    file: Annotated[
        Path, typer.Argument(help="A GGUF file, or any shard of a split one.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Show what is in a GGUF: architecture, sizes, types, MTP and vision parts, tokenizer."""
    from gguf2st.inspection import inspect as run  # noqa: PLC0415

    _print(run(file), as_json=as_json)


@app.command()
def archs(as_json: Json = False) -> None:
    """List the supported architectures and projectors."""
    from dataclasses import asdict  # noqa: PLC0415

    from gguf2st.inspection import architectures  # noqa: PLC0415

    found = architectures()
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in found], indent=2))
        return
    for entry in found:
        names = ", ".join(entry.architectures) or "projector " + ", ".join(entry.projectors)
        typer.echo(f"{names:28} {entry.family}")


def _interrupted(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake ends with one sentence and its exit code."""
    signal.signal(signal.SIGTERM, _interrupted)
    command: Callable[..., Any] = typer.main.get_command(app)
    try:
        command(arguments)
    except Gguf2stError as error:
        from gguf2st.report import printable  # noqa: PLC0415  # only for a mistake

        typer.echo(f"gguf2st: {printable(str(error))}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
