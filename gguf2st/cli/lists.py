"""`gguf2st archs` and `gguf2st formats`."""

import json
import sys

import typer

from gguf2st.cli.options import Json


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


def formats() -> None:
    """List the output formats."""
    from gguf2st.targets import target_named, target_names  # noqa: PLC0415

    for name in target_names():
        # Each format's file begins with what it is.
        file = sys.modules[type(target_named(name)).__module__]
        summary = (file.__doc__ or "").partition("\n")[0]
        typer.echo(f"{name:20} {summary}")
