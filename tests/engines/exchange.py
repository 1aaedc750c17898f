"""What the tests and the engines' processes tell each other: jobs one way, results the other.

An engine runs in a process of its own and loads several checkpoints one after the other, so its
slow import is paid once. It reads a JSON list of jobs from standard input and prints one JSON
result a line to standard output; whatever the engine itself prints goes to standard error.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SHIM = HERE / "shim"


@dataclass(frozen=True)
class Prompt:
    """Token ids, text, or chat messages for the checkpoint's own template.

    Messages have transformers' form; an image is `{"type": "image", "path": FILE}`.
    """

    ids: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Job:
    """One checkpoint to load in one dtype, and the prompts to continue greedily."""

    name: str
    directory: str
    dtype: str
    prompts: list[Prompt] = field(default_factory=list)
    new_tokens: int = 12
    options: dict[str, Any] = field(default_factory=dict)  # more arguments for the engine


@dataclass(frozen=True)
class Answer:
    """What an engine made of one prompt."""

    ids: list[int]  # of the prompt, as the model saw it
    prompt_log_probs: list[float]  # of ids[1:], each given what precedes it
    tokens: list[int]  # generated greedily, whether or not one of them ends the text
    candidates: list[dict[int, float]]  # the likeliest tokens of each step with their log-probs
    text: str


@dataclass(frozen=True)
class Result:
    """What became of a job: answers, or the error with its traceback."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)  # of the model, tokenizer and processor
    kernels: list[str] = field(default_factory=list)  # what computes the quantized layers
    drafts: int = 0  # speculative ones, whether or not they were accepted
    loading: dict[str, list[str]] = field(default_factory=dict)  # keys that don't match the model
    error: str | None = None
    seconds: float = 0.0


def serve(run: Callable[[Job], Result]) -> None:
    """Be an engine's process: run every job of standard input and print its result."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # also for what compiled code prints
    # An engine's modules are half a million objects that no collection has to look at again.
    gc.freeze()
    for job in json.load(sys.stdin):
        job["prompts"] = [Prompt(**prompt) for prompt in job["prompts"]]
        try:
            result = run(Job(**job))
        except Exception:
            result = Result(job["name"], error=traceback.format_exc())
        print(json.dumps(asdict(result)), file=results, flush=True)
        gc.collect()  # a failed engine dies with its traceback, and not while the next one starts
        gc.freeze()


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a fork, which has all imports and leaves nothing behind.

    Its exceptions come as `RuntimeError`: not all of an engine's can be sent from process to process.
    """
    [result] = in_children(function, [arguments])
    return result


def in_children(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """What a function returns for each tuple of arguments, in forks that run at once.

    Modules that the forks imported are imported here, too: the next ones find them.
    """
    context = multiprocessing.get_context("fork")
    children = []
    for arguments in calls:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_answer, args=(sender, function, arguments))
        child.start()
        sender.close()
        children.append((child, receiver))
    results, errors = [], []
    for child, receiver in children:
        try:
            result, error, modules = receiver.recv()
        except EOFError:
            child.join()
            result, error, modules = None, f"the process ended with code {child.exitcode}", []
        child.join()
        results.append(result)
        errors.append(error)
        for name in modules:
            with contextlib.suppress(Exception):  # made at run time, and in no file
                importlib.import_module(name)
    gc.freeze()
    if error := next(filter(None, errors), ""):
        raise RuntimeError(error)
    return results


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Send what a function returns, the traceback of its exception, and what it imported."""
    known = set(sys.modules)
    try:
        result, error = function(*arguments), ""
    except Exception:
        result, error = None, traceback.format_exc()
    sender.send((result, error, [name for name in list(sys.modules) if name not in known]))


def ask(
    module: str, jobs: list[Job], log: Path, timeout: float, *, shim: bool = True
) -> dict[str, Result]:
    """Run jobs in a new process of `module`; return the results by the jobs' names.

    `shim` is for engines that are installed beside a CPU build of torch.

    A job that the process didn't live to finish gets a result with the end of its log as the error.
    """
    inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SHIM)] * shim + [str(REPOSITORY)] + inherited),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the models are tiny, and both engines run at the same time
    }
    with log.open("w+", encoding="utf-8") as errors:
        process = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps([asdict(job) for job in jobs]),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    results = {}
    for line in process.stdout.splitlines():
        result = json.loads(line)
        result["answers"] = [read_answer(answer) for answer in result["answers"]]
        results[result["name"]] = Result(**result)
    for job in jobs:
        if job.name not in results:
            end = log.read_text("utf-8", errors="replace")[-4000:]
            error = f"{module} ended with code {process.returncode} before this job did:\n{end}"
            results[job.name] = Result(job.name, error=error)
    return results


def read_answer(fields: dict[str, Any]) -> Answer:
    """Undo what JSON makes of an answer's keys."""
    candidates = [{int(token): p for token, p in step.items()} for step in fields["candidates"]]
    return Answer(**fields | {"candidates": candidates})
