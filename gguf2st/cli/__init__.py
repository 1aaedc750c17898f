"""The command line: parse, call the library, print its report.

Modules of commands do without `from __future__ import annotations`: typer would compile each
annotation, which `--help` would wait for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import typer

from gguf2st.cli.convert import convert
from gguf2st.cli.help import Command, Group
from gguf2st.cli.inspect import inspect
from gguf2st.cli.lists import archs, formats
from gguf2st.cli.repair import repair
from gguf2st.cli.verify import verify
from gguf2st.errors import Gguf2stError

app = typer.Typer(
    help="Turn GGUF models into Hugging Face checkpoints that vLLM, SGLang and transformers load as they are.",
    no_args_is_help=True,
    cls=Group,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (convert, inspect, verify, repair, archs, formats):
    app.command(cls=Command)(command)


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
