"""`gguf2st convert`."""

from pathlib import Path
from typing import Annotated

import typer

from gguf2st.cli.options import Json
from gguf2st.cli.output import Bar, print_report
from gguf2st.cli.parsing import ENGINES, parse_names, parse_scheme, parse_size, parse_sizes

_FILES, _FORMAT, _RULES, _OUTPUT = "Files", "Format", "What the engines must take", "Output"


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
            "0: none. Default: 0.35, none for 8 bits.",
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
        engines=tuple(parse_names("--engine", engine, ENGINES)) if engine else None,
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
    bar = Bar(hidden=dry_run)
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
    print_report(report, as_json=as_json)
