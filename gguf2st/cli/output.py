"""Reports, and progress while they are not there yet."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from gguf2st.run import Progress


def print_report(report: Any, *, as_json: bool) -> None:
    """A report as text or JSON, on standard output."""
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else report.to_text())


class Bar:
    """One progress bar by bytes on standard error; absent when that isn't a terminal."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden or not sys.stderr.isatty()
        self._bar: Any = None
        self._told = False

    def __call__(self, progress: Progress) -> None:
        """Show how far a conversion is."""
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
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
