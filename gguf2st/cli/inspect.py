"""`gguf2st inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from gguf2st.cli.options import Json
from gguf2st.cli.output import print_report


def inspect(
    file: Annotated[
        Path, typer.Argument(help="A GGUF file, or any shard of a split one.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Show what is in a GGUF: architecture, sizes, types, MTP and vision parts, tokenizer."""
    from gguf2st.inspection import inspect as run  # noqa: PLC0415

    print_report(run(file), as_json=as_json)
