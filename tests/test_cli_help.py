"""What `gguf2st --help` shows, and what it must not wait for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gguf2st.cli import app

COMMANDS = ("convert", "inspect", "verify", "repair", "archs", "formats")


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    return result.output


def test_commands_have_their_whole_summaries():
    text = " ".join(shown().split())
    for command in COMMANDS:
        (about,) = re.findall(rf" {command} ([A-Z][^.]*\.)", text)
        assert about in " ".join(shown(command).split())
    assert "..." not in text.replace("[ARGS]...", "")


def test_options_stand_in_sections():
    sections = re.findall(r"^(\S.*):\n", shown("convert"), re.MULTILINE)
    panels = ["Files", "Format", "What the engines must take", "Output"]
    assert sections == ["Arguments", "Options", *panels]


@pytest.mark.parametrize("code", [
    "import gguf2st",
    "from gguf2st.cli import main; main(['--help'])",
    "from gguf2st.cli import main; main(['convert', '--help'])",
])  # fmt: skip
def test_help_and_import_load_nothing_large(code):
    large = {"numba", "numpy", "rich", "safetensors", "torch", "tqdm"}
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {code}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "gguf2st" in loaded
    assert not large & loaded
