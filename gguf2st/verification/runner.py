"""Runs the rules over a checkpoint directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguf2st.engines import Deployment, engine_named
from gguf2st.errors import UsageError
from gguf2st.verification.checkpoint import CheckpointView, open_checkpoint
from gguf2st.verification.context import Context
from gguf2st.verification.finding import ALL_ENGINES, RULES, Effect, Finding, Mend, Remedy, Rule
from gguf2st.verification.report import VerifyReport, verdict_on

if TYPE_CHECKING:
    from gguf2st.gguf import GgufModel

# What a value of the wrong kind in a config can cause: hostile, but not worth a check at each use.
_WRONG_KIND = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


def verify(
    directory: str | os.PathLike[str],
    engines: Sequence[str] = ALL_ENGINES,
    *,
    tensor_parallel: Sequence[int] = (1,),
    compute_capability: int | None = None,
    cpu: bool = False,
    deep: bool = False,
    headers_only: bool = False,
    against: str | os.PathLike[str] | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    mtp: str | os.PathLike[str] | None = None,
) -> VerifyReport:
    """Say whether engines will load a checkpoint directory right, and why not.

    `engines` are of "vllm", "sglang" and "hf" (transformers). `compute_capability` is that of
    the GPUs (75, 86, ...), `cpu` means their builds for CPUs. Only headers and JSON files are
    read, unless `deep` asks for the values. `headers_only` says that files may end before
    their data do. `against` is a GGUF with which all values are compared, `mmproj` and `mtp` are the
    files beside it.

    Raises `UsageError` for an unknown engine and `InputError` for a directory that holds no
    checkpoint; whatever is wrong with one becomes a finding. With `against`, all that
    `open_model` raises, and `UnsupportedError` for an architecture that can't be compared.
    """
    if against is None and (mmproj is not None or mtp is not None):
        raise UsageError(
            "an mmproj or MTP file is compared beside its model; give that with --against."
        )
    if against is not None and headers_only:
        raise UsageError(
            "--against compares values, and --headers-only says that they aren't there."
        )
    model = None
    if against is not None:
        from gguf2st.gguf import open_model  # noqa: PLC0415  # numpy, when asked for

        model = open_model(against, mmproj, mtp)
    view = open_checkpoint(Path(directory), headers_only=headers_only)
    return verify_view(
        view,
        engines,
        tensor_parallel=tensor_parallel,
        compute_capability=compute_capability,
        cpu=cpu,
        deep=deep,
        against=model,
    )


def verify_view(
    view: CheckpointView,
    engines: Sequence[str] = ALL_ENGINES,
    *,
    tensor_parallel: Sequence[int] = (1,),
    compute_capability: int | None = None,
    cpu: bool = False,
    deep: bool = False,
    against: GgufModel | None = None,
) -> VerifyReport:
    """The same for a directory that has been opened already."""
    asked = {name: engine_named(name) for name in dict.fromkeys(engines)}
    dtype = view.config.get("dtype", view.config.get("torch_dtype"))
    deployment = Deployment(
        tuple(tensor_parallel),
        compute_capability,
        cpu,
        "float16" if dtype == "float16" else "bfloat16",
    )
    context = Context(view, asked, deployment)
    findings = [
        finding
        for rule in RULES.values()
        if (deep or not rule.deep) and not rule.against
        for finding in _findings(rule, context)
        if not finding.engine or finding.engine in asked
    ]
    comparison = None
    if against is not None:
        from gguf2st.verification.against import compare  # noqa: PLC0415  # numpy, when asked for

        comparison = compare(context, against)
        findings += comparison.findings
    headers = (*view.headers, *view.strays)
    return VerifyReport(
        directory=view.directory,
        model_class=view.model_class,
        quantization=_quantization(context),
        tensors=len(view.tensors),
        total_bytes=sum(header.data_bytes for header in view.headers),
        files=len(headers),
        verdicts=tuple(verdict_on(name, asked[name].title, findings) for name in asked),
        findings=tuple(findings),
        unchecked=tuple(_unchecked(context)),
        headers_only=view.headers_only,
        deep=deep,
        against=comparison,
    )


def _findings(rule: Rule, context: Context) -> Iterator[Finding]:
    if not set(rule.engines) & set(context.engines):
        return
    try:
        yield from rule.check(context)
    except _WRONG_KIND as error:
        text = " ".join(str(error).encode("utf-8", "backslashreplace").decode().split())[:120]
        yield Finding(
            rule.id,
            "",
            Effect.CRASH,
            ("config.json",),
            f"a value is of the wrong kind, so {rule.id} can't be checked ({text})",
            Remedy("give the field the value that it has in the original model", Mend.MISSING),
        )


def _quantization(context: Context) -> str:
    schemes = ", ".join(map(str, context.schemes))
    return " ".join(filter(None, (context.view.method, schemes)))


def _unchecked(context: Context) -> Iterator[str]:
    """What the rules can't say about this checkpoint."""
    view = context.view
    name = view.model_class or "a checkpoint without architectures"
    unknown = [e.title for key, e in context.engines.items() if not context.known(key)]
    if unknown:
        yield (
            f"how {', '.join(unknown)} name{'s' if len(unknown) == 1 else ''} and join the layers of "
            f"{name} isn't known here, so rules about names, joined layers and kernels weren't applied"
        )
    if context.expected is None:
        yield f"the parameters of {name} aren't known here, so missing tensors weren't looked for"
    if view.method and context.view.config and not context.readable:
        yield "the quantization_config can't be read, so it wasn't compared with the tensors"
    unmatched = [e.title for e in context.engines.values() if view.method in e.unchecked]
    if unmatched:
        yield f"how {', '.join(unmatched)} matches a {view.method} config isn't known here"
