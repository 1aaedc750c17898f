"""Options that commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
