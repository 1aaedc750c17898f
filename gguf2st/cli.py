"""The command line: parse, call the library, print its report."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguf2st.errors import Gguf2stError, UsageError

if TYPE_CHECKING:
    from gguf2st.run import Progress

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
# What verify and repair ask for alike
Checkpoint = Annotated[
    Path, typer.Argument(help="Directory of a checkpoint, from anywhere.", show_default=False)
]
Engines = Annotated[str, typer.Option(help="Comma-separated: vllm, sglang, hf; or all.")]
Sizes = Annotated[
    str, typer.Option(help="Tensor-parallel sizes that it shall run at, such as 1,2,4.")
]
Capability = Annotated[
    int | None, typer.Option(help="Compute capability of the cards, such as 75 or 86.")
]
Cpu = Annotated[bool, typer.Option("--cpu", help="The engines' builds for CPUs.")]


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 2GiB. Raises `UsageError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise UsageError(f"{text!r} isn't a size; write for example 5GB or 500MB.")
    return int(float(found[1]) * unit)


def parse_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Comma-separated names, each one of `known`. Raises `UsageError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name!r} isn't one of {', '.join(known)}.")
    if not names:
        raise UsageError(f"{option} needs one of {', '.join(known)}.")
    return names


def parse_engines(text: str) -> Sequence[str]:
    """Comma-separated engines, or all of them. Raises `UsageError`."""
    return _ENGINES if text == "all" else parse_names("--engine", text, _ENGINES)


def parse_sizes(text: str) -> list[int]:
    """Comma-separated tensor-parallel sizes. Raises `UsageError`."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UsageError(f"--tp {text!r} isn't a list of sizes; write for example 1,2,4.")
    return [int(size) for size in text.split(",")]


def parse_scheme(text: str) -> tuple[str, str]:
    """Expression and scheme of REGEX=SCHEME. Raises `UsageError`."""
    pattern, equals, scheme = text.rpartition("=")
    if not (pattern and equals):
        raise UsageError(f"--scheme {text!r} has no scheme; write for example self_attn=int8-g32.")
    return pattern, scheme


def _print(report: Any, *, as_json: bool) -> None:
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else report.to_text())


class _Bar:
    """One progress bar by bytes on standard error; absent when that isn't a terminal."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden or not sys.stderr.isatty()
        self._bar: Any = None
        self._told = False

    def __call__(self, progress: Progress) -> None:
        if self._hidden:
            return
        if progress.compiling:
            if not self._told:
                typer.echo("compiling kernels for this processor, once", err=True)
            self._told = True
            return
        if self._bar is None:
            from tqdm import tqdm  # noqa: PLC0415  # only when there is something to show

            self._bar = tqdm(total=progress.total_bytes, unit="B", unit_scale=True, file=sys.stderr)
        self._bar.update(progress.done_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


_ENGINES = ("vllm", "sglang", "hf")
_FILES, _FORMAT, _RULES, _OUTPUT = "Files", "Format", "What the engines must take", "Output"


@app.command()
def convert(
    model: Annotated[
        Path, typer.Argument(help="A GGUF file, or any shard of a split one.", show_default=False)
    ],
    mmproj: Annotated[
        Path | None,
        typer.Option(
            help="The vision projector that belongs to the model.", rich_help_panel=_FILES
        ),
    ] = None,
    mtp: Annotated[
        str | None,
        typer.Option(
            help="A separate file with the model's MTP blocks; or the word drop to leave them out.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(help="An importance matrix that weights the error.", rich_help_panel=_FILES),
    ] = None,
    smoothing: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="With --imatrix: exponent of the activations' size in the scales that move into weights; "
            "0: none. Default: 0.35.",
            rich_help_panel=_FORMAT,
        ),
    ] = None,
    activation_scales: Annotated[
        Path | None,
        typer.Option(
            help="JSON or safetensors file of modules' static activation scales, for w4afp8.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    tokenizer_from: Annotated[
        str | None,
        typer.Option(
            help="Directory (or hub name) of the original tokenizer.", rich_help_panel=_FILES
        ),
    ] = None,
    config_from: Annotated[
        str | None,
        typer.Option(
            help="Directory (or hub name) of the original config.json.", rich_help_panel=_FILES
        ),
    ] = None,
    mappings: Annotated[
        Path | None,
        typer.Option(
            help="Directory of mapping tables instead of the shipped ones.", rich_help_panel=_FILES
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(help="Output format; `gguf2st formats` lists all.", rich_help_panel=_FORMAT),
    ] = "bf16",
    bits: Annotated[int | None, typer.Option(help="4 or 8.", rich_help_panel=_FORMAT)] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Columns that share a scale; 0: the whole row.", rich_help_panel=_FORMAT),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric", help="Without or with zero points.", rich_help_panel=_FORMAT
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(help="Variant of the format, such as fp8's block.", rich_help_panel=_FORMAT),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bf16 or f16: unquantized tensors and scales.", rich_help_panel=_FORMAT),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            help="REGEX=SCHEME: another scheme for matching modules, such as self_attn=int8-g32.",
            rich_help_panel=_FORMAT,
        ),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(
            help="0: int4 g128; 1: int4 g32; 2: and int8 for q, k and v; 3: and for down projections. "
            "Chooses bits and group sizes itself.",
            rich_help_panel=_FORMAT,
        ),
    ] = None,
    bits_per_weight: Annotated[
        float | None,
        typer.Option(
            help="The most exact mix whose whole output, as reported, has at most so many bits per weight.",
            rich_help_panel=_FORMAT,
        ),
    ] = None,
    fit: Annotated[
        str,
        typer.Option(help="search for the scales of least error, or rtn.", rich_help_panel=_FORMAT),
    ] = "search",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave modules that match this expression unquantized.", rich_help_panel=_FORMAT
        ),
    ] = None,
    quantize: Annotated[
        list[str] | None,
        typer.Option(help="Quantize matching modules that would be kept.", rich_help_panel=_FORMAT),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: vllm, sglang, hf; default: all that take the format.",
            rich_help_panel=_RULES,
        ),
    ] = None,
    tp: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel sizes to keep valid, such as 1,2,4.", rich_help_panel=_RULES
        ),
    ] = "1",
    sm: Annotated[
        int | None,
        typer.Option(
            help="Compute capability of the cards, such as 75 or 86.", rich_help_panel=_RULES
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Directory to write; default: MODEL-FORMAT.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest shard, such as 5GB.", rich_help_panel=_OUTPUT)
    ] = "5GB",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an existing checkpoint directory.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Plan and report, but write nothing.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    as_json: Json = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Workers; default: up to 4.", rich_help_panel=_OUTPUT)
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda or cuda:N: where rows are decoded and quantized.",
            rich_help_panel=_OUTPUT,
        ),
    ] = "cpu",
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Take fewer workers where more would need more memory, such as 1GB.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:
    """Convert a model, with its projector and MTP blocks, to a Hugging Face directory."""
    from gguf2st.conversion import DEFAULT_THREADS  # noqa: PLC0415  # --help shouldn't wait for numpy
    from gguf2st.conversion import convert as run  # noqa: PLC0415
    from gguf2st.options import PlanOptions  # noqa: PLC0415
    from gguf2st.targets import TargetOptions  # noqa: PLC0415

    options = PlanOptions(
        to=to,
        target=TargetOptions(
            bits, group_size, symmetric, variant, dtype, tuple(map(parse_scheme, scheme or ()))
        ),
        engines=tuple(parse_names("--engine", engine, _ENGINES)) if engine else None,
        tensor_parallel=tuple(parse_sizes(tp)),
        compute_capability=sm,
        keep=tuple(keep or ()),
        quantize=tuple(quantize or ()),
        quality=quality,
        bits_per_weight=bits_per_weight,
        smoothing=smoothing,
        fit=parse_names("--fit", fit, ("search", "rtn"))[0],
        max_shard_bytes=parse_size(max_shard_size),
        mapping_directory=mappings,
        threads=threads or DEFAULT_THREADS,
        device=device,
        max_memory=None if max_memory is None else parse_size(max_memory),
    )
    bar = _Bar(hidden=dry_run)
    try:
        report = run(
            model,
            output,
            mmproj=mmproj,
            mtp=None if mtp == "drop" else mtp,
            drop_mtp=mtp == "drop",
            imatrix=imatrix,
            activation_scales=activation_scales,
            tokenizer_from=tokenizer_from,
            config_from=config_from,
            options=options,
            dry_run=dry_run,
            force=force,
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
    _print(report, as_json=as_json)
    if not report.right:
        raise typer.Exit(1)


@app.command()
def repair(
    directory: Checkpoint,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory to write.", show_default=False)
    ],
    engine: Engines = "all",
    tp: Sizes = "1",
    sm: Capability = None,
    cpu: Cpu = False,
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
        dry_run=dry_run,
        force=force,
    )
    _print(report, as_json=as_json)
    if not report.right:
        raise typer.Exit(1)


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


@app.command()
def formats() -> None:
    """List the output formats."""
    from gguf2st.targets import target_named, target_names  # noqa: PLC0415

    for name in target_names():
        # Each format's file begins with what it is.
        file = sys.modules[type(target_named(name)).__module__]
        summary = (file.__doc__ or "").partition("\n")[0]
        typer.echo(f"{name:20} {summary}")


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
