"""The rule about the schema of a quantization_config of compressed-tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gguf2st.verification.context import Context
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy, rule
from gguf2st.verification.stored import Layout

# compressed_tensors' quant_scheme.py and quant_args.py, where other keys are errors.
_SCHEME_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
_ARGUMENT_KEYS = {
    "num_bits": int,
    "type": str,
    "symmetric": bool,
    "group_size": int,
    "strategy": str,
    "block_structure": list,
    "dynamic": (bool, str),
    "actorder": (bool, str),
    "scale_dtype": str,
    "zp_dtype": str,
    "observer": str,
    "observer_kwargs": dict,
}
_STRATEGIES = {"tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"}
_ORDERED = {True, "group", "dynamic"}


@rule("D-30", "the schema of compressed-tensors")
def schema(context: Context) -> Iterator[Finding]:
    """Known keys of the right kinds, no activation order, "quantization_status": "compressed".

    Source: compressed_tensors' quant_config.py, quant_scheme.py, quant_args.py (pydantic models
    that forbid further keys); transformers' quantizer_compressed_tensors.py.
    """
    if context.view.method != "compressed-tensors":
        return
    config = context.view.quantization
    for where, reason, value in _mistakes(config):
        yield Finding(
            "D-30",
            "",
            Effect.CRASH,
            (where,),
            reason,
            Remedy("write the key as compressed-tensors has it", Mend.CONFIG, values=value),
            f"ValidationError: {where}",
        )
    if "hf" in context.engines and config.get("quantization_status") != "compressed":
        yield Finding(
            "D-30",
            "hf",
            Effect.WRONG,
            ("quantization_config.quantization_status",),
            'isn\'t "compressed", so transformers builds no packed layers and leaves the codes unread',
            Remedy(
                'write "quantization_status": "compressed"',
                Mend.CONFIG,
                values={"quantization_config.quantization_status": "compressed"},
            ),
        )
    yield from _formats(context)


def _mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Dotted key, what is wrong with it, and the values that would mend it."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        yield "quantization_config.config_groups", "there are no groups", {}
        return
    ignore = config.get("ignore")
    if ignore is not None and not _texts(ignore):
        yield "quantization_config.ignore", "must be a list of names", {}
    for name, group in groups.items():
        path = f"quantization_config.config_groups.{name}"
        if not isinstance(group, dict):
            yield path, "must be an object with targets and weights", {}
            continue
        for key in group.keys() - _SCHEME_KEYS:
            yield f"{path}.{key}", "compressed-tensors has no such key", {f"{path}.{key}": None}
        if not _texts(group.get("targets")):
            yield f"{path}.targets", "must be a list of names", {}
        for part in ("weights", "input_activations", "output_activations"):
            arguments = group.get(part)
            if arguments is None and part != "weights":
                continue
            if not isinstance(arguments, dict):
                yield f"{path}.{part}", "must be an object", {}
                continue
            yield from _argument_mistakes(f"{path}.{part}", arguments)


def _argument_mistakes(
    path: str, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for key, value in arguments.items():
        kind = _ARGUMENT_KEYS.get(key)
        if kind is None:
            yield f"{path}.{key}", "compressed-tensors has no such key", {f"{path}.{key}": None}
        elif value is not None and not isinstance(value, kind):  # type: ignore[arg-type]
            yield f"{path}.{key}", f"{str(value)[:40]!r} is of the wrong kind", {}
    if arguments.get("strategy") not in (None, *_STRATEGIES):
        yield (
            f"{path}.strategy",
            f"isn't one of {', '.join(sorted(_STRATEGIES))}",
            {},
        )
    if arguments.get("strategy") == "group" and not (arguments.get("group_size") or 0) > 0:
        yield f"{path}.group_size", "groups need a size", {}
    order = arguments.get("actorder")
    if isinstance(order, (bool, str)) and order in _ORDERED:
        yield (
            f"{path}.actorder",
            f"{order!r} is an activation order, which no engine reads any more",
            {f"{path}.actorder": None},
        )


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


_FORMATS = {
    Layout.PACKED: {"pack-quantized"},
    Layout.NVFP4: {"nvfp4-pack-quantized"},
    Layout.MXFP4: {"mxfp4-pack-quantized"},
    Layout.CODES: {"int-quantized", "float-quantized", "naive-quantized"},
}


def _formats(context: Context) -> Iterator[Finding]:
    config = context.view.quantization
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return
    formats = {config.get("format")}
    formats |= {group.get("format") for group in groups.values() if isinstance(group, dict)}
    formats -= {None, "mixed-precision"}
    layouts = {m.layout for m in context.quantized.values() if m.layout in _FORMATS}
    for layout in layouts:
        if formats and not formats & _FORMATS[layout]:
            modules = tuple(n for n, m in context.quantized.items() if m.layout is layout)
            yield Finding(
                "D-30",
                "",
                Effect.CRASH,
                modules,
                f"stored as {layout}, and the config's format is {', '.join(sorted(map(str, formats)))}",
                Remedy(
                    "write the format that the tensors have",
                    Mend.MATCH,
                    values={"quantization_config.format": sorted(_FORMATS[layout])[0]},
                ),
                "ValueError: There is no module or parameter named ...",
            )
