"""The command line as a process of its own, without waiting for its imports each time.

A server imports the package once and forks for each call. In the fork its loop ends and the program
goes on as `python -m gguf2st.cli` would: arguments, environment, directory, standard streams and exit
code are those of a real process, and the interpreter shuts down as ever. What is about imports,
signals or limits of a process needs a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 120


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `gguf2st` with these arguments in the repository's directory."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        call = {
            "arguments": [str(argument) for argument in arguments],
            "environment": os.environ | {"PYTHONIOENCODING": "utf-8"},
            "streams": list(map(str, streams)),
        }
        server = _server()
        watchdog = threading.Timer(SECONDS, server.kill)
        watchdog.start()
        server.stdin.write(json.dumps(call) + "\n")
        server.stdin.flush()
        code = server.stdout.readline()
        watchdog.cancel()
        assert code, f"no end after {SECONDS} s"
        stdout, stderr = (path.read_text("utf-8") for path in streams)
    return subprocess.CompletedProcess(call["arguments"], int(code), stdout, stderr)


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.command_line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )

    def end() -> None:
        server.kill()
        server.communicate()

    atexit.register(end)
    return server


def _serve() -> bool:
    """Whether this is a fork that a call asks to be the command."""
    for line in sys.stdin:
        if not (child := os.fork()):
            _become(**json.loads(line))
            return True
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return False


def _become(arguments: list[str], environment: dict[str, str], streams: list[str]) -> None:
    sys.argv[1:] = arguments
    os.environ.clear()
    os.environ.update(environment)
    names = (os.devnull, *streams)
    for descriptor, (name, mode) in enumerate(zip(names, "rww", strict=True)):
        with Path(name).open(mode) as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    from gguf2st.cli import main

    # A first conversion imports everything, and makes numba ready to load kernels.
    model = ROOT / "fixtures" / "llama-small" / "llama-small-bf16.gguf"
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(folder, "text").open("w") as text,
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        contextlib.suppress(SystemExit),
    ):
        main(["convert", str(model), "-o", str(Path(folder, "out"))])
    gc.freeze()  # no fork has to look at all this again
    if _serve():
        main()
