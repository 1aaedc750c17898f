"""A quantization_config that says what the tensors are.

What tensors don't tell (activations, observers, kernels' preferences) is taken from the old one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gguf2st.engines import configs
from gguf2st.errors import UnsupportedError
from gguf2st.repairing.draft import CONFIG
from gguf2st.scheme import Scheme
from gguf2st.targets.compressed import Arguments, arguments, entries, token_activations
from gguf2st.targets.names import check_undivided, cover, expressions
from gguf2st.targets.skipped import names, substrings
from gguf2st.verification.context import EXCEPTIONS, Context
from gguf2st.verification.stored import Layout, Stored

HEAD = "lm_head"
_STORAGE = {
    Layout.PACKED: "pack-quantized",
    Layout.NVFP4: "nvfp4-pack-quantized",
    Layout.MXFP4: "mxfp4-pack-quantized",
}
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj")}
Config = dict[str, Any]


def derived(context: Context, *, fresh: bool = False) -> Config | None:
    """The quantization_config of a checkpoint, or None where nothing is quantized.

    `fresh` takes no group of the old one over. Raises `UnsupportedError` for tensors that no
    config could describe, `VerificationError` where an engine would join what is stored otherwise.
    """
    quantized = context.quantized
    if not quantized:
        return None
    old = dict(context.view.quantization)
    if not old:
        # Engines find it elsewhere; the first of these places is the one that they take.
        old = dict(next(iter(context.view.quantization_places.values()), {}))
    method = _method(context, quantized)
    if not old:
        _check_bits(context, quantized)
    old = old if old.get("quant_method", method) == method else {}
    build = {
        "compressed-tensors": _compressed,
        "awq": _awq,
        "gptq": _gptq,
        "fp8": _fp8,
        "mxfp4": _named,
        "w4afp8": _named,
    }[method]
    if fresh and method == "compressed-tensors":
        old.pop("config_groups", None)
    return build(old, quantized, _unquantized(context)) | {"quant_method": method}


def _check_bits(context: Context, quantized: Mapping[str, Stored]) -> None:
    """Packed codes of 4 and 8 bits differ in the number of columns alone."""
    known = context.expected.columns if context.expected is not None else {}
    for name, matrix in quantized.items():
        packed = matrix.layout in (Layout.PACKED, Layout.GPTQ)
        if packed and known.get(context.canonical(name)) != matrix.shape[1]:
            raise UnsupportedError(
                f"there is no quantization_config, and without the sizes of the class nothing tells how "
                f"many bits the codes of {name} have."
            )


def _method(context: Context, quantized: Mapping[str, Stored]) -> str:
    found = {_method_of(matrix, context.view.method) for matrix in quantized.values()}
    if len(found) == 1:
        return found.pop()
    if found == {"w4afp8", "fp8"}:
        return "w4afp8"
    raise UnsupportedError(
        f"{CONFIG} can't describe tensors of several methods ({', '.join(sorted(found))})."
    )


def _method_of(matrix: Stored, said: str) -> str:
    match matrix.layout:
        case Layout.AWQ:
            return "awq"
        case Layout.GPTQ:
            return "gptq"
        case Layout.STACKED:
            return "mxfp4"
        case Layout.HALF_BYTES:
            return "w4afp8"
        case Layout.MODELOPT:
            raise UnsupportedError(
                f"{matrix.name} is stored as ModelOpt does, for which no quantization_config can be "
                "derived; take that of the original."
            )
        case Layout.BROKEN:
            raise UnsupportedError(f"{matrix.name} has no whole set of tensors of any format.")
        case Layout.CODES if "weight_scale_inv" in matrix.leaves or said == "fp8":
            return "fp8"
        case _:
            return "compressed-tensors"


def _unquantized(context: Context) -> list[str]:
    """Matrices as checkpoints with single experts name them, and a head that shares the embedding."""
    found: list[str] = []
    for name, matrix in context.stored.items():
        parent, _, leaf = name.rpartition(".")
        if matrix.quantized:
            continue
        if "" not in matrix.leaves:
            found.append(name)
        elif parent.endswith(".experts"):
            found += [f"{parent}.0.{part}" for part in _STACKS.get(leaf, (leaf,))]
    if HEAD not in context.quantized:
        found.append(HEAD)
    return list(dict.fromkeys(found))


def _compressed(old: Config, quantized: Mapping[str, Stored], unquantized: list[str]) -> Config:
    groups = _old_groups(old)
    members: dict[tuple[Scheme, str], list[Stored]] = {}
    for matrix in quantized.values():
        scheme = matrix.scheme or Scheme("int", 4, 0)
        members.setdefault((scheme, _storage(matrix)), []).append(matrix)
    # The largest is targeted by class.
    order = sorted(members, key=lambda key: -len(members[key]))
    targets, ignore = entries([[m.name for m in members[key]] for key in order], unquantized)
    written = {}
    for number, (key, matched) in enumerate(zip(order, targets, strict=True)):
        scheme, storage = key
        before = _alike(groups, scheme)
        first = members[key][0]
        # Schemas forbid further keys, and older ones "format" where nobody wrote it.
        written[f"group_{number}"] = {
            **({"format": storage} if before is None or "format" in before else {}),
            "targets": matched,
            "weights": before["weights"] if before else _weights(first, scheme),
            "input_activations": before.get("input_activations")
            if before
            else _activations(first, scheme),
            "output_activations": before.get("output_activations") if before else None,
        }
    formats = {storage for _, storage in order}
    kept = {key: value for key, value in old.items() if key not in EXCEPTIONS}
    return kept | {
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        # transformers builds modules for packed tensors only then.
        "quantization_status": "compressed",
        "config_groups": written,
        "ignore": ignore,
    }


def _old_groups(old: Config) -> list[tuple[Scheme, dict[str, Any]]]:
    found = []
    groups = old.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        try:
            found.append((configs.group_scheme(group), group))
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return found


def _alike(
    groups: Sequence[tuple[Scheme, dict[str, Any]]], scheme: Scheme
) -> dict[str, Any] | None:
    """The old group with weights of that scheme; widths of activations aren't in tensors."""
    for said, group in groups:
        if replace(said, activation_bits=scheme.activation_bits) == scheme:
            return group
    return None


def _storage(matrix: Stored) -> str:
    if matrix.layout in _STORAGE:
        return _STORAGE[matrix.layout]
    return "int-quantized" if matrix.scheme and matrix.scheme.kind == "int" else "float-quantized"


def _weights(matrix: Stored, scheme: Scheme) -> Arguments:
    others: dict[str, Any] = {"symmetric": scheme.symmetric}
    strategy = "channel"
    scale = matrix.leaves.get("weight_scale")
    if scheme.kind == "nvfp4":
        strategy = "tensor_group"
    elif scheme.block_rows > 1:
        strategy = "block"
        others["block_structure"] = [scheme.block_rows, scheme.group_size]
    elif scheme.group_size:
        strategy = "group"
    elif scale is not None and scale.shape in ((), (1,), (1, 1)):
        strategy = "tensor"
    if strategy in ("group", "tensor_group"):
        others["group_size"] = scheme.group_size
    if scheme.kind == "mxfp4":
        others["scale_dtype"] = "torch.uint8"
    return arguments("int" if scheme.kind == "int" else "float", scheme.bits, strategy, **others)


def _activations(matrix: Stored, scheme: Scheme) -> Arguments | None:
    """Eight bits for codes of one byte, which kernels know in no other way."""
    if matrix.layout is Layout.NVFP4 and "input_global_scale" in matrix.leaves:
        return arguments("float", 4, "tensor_group", group_size=scheme.group_size, dynamic="local")
    if matrix.layout is not Layout.CODES:
        return None
    kind = "int" if scheme.kind == "int" else "float"
    if "input_scale" in matrix.leaves:
        return arguments(kind, 8, "tensor")
    return token_activations(kind)


def _awq(old: Config, quantized: Mapping[str, Stored], unquantized: list[str]) -> Config:
    scheme, written = _only(quantized, "awq"), list(quantized)
    check_undivided([written, unquantized])
    return (
        {"version": "gemm", "lm_head": _head(written)}
        | old
        | {
            "bits": scheme.bits,
            "group_size": scheme.group_size or -1,
            "zero_point": True,
            "modules_to_not_convert": substrings(unquantized, written),
        }
    )


def _gptq(old: Config, quantized: Mapping[str, Stored], unquantized: list[str]) -> Config:
    scheme, written = _only(quantized, "gptq"), list(quantized)
    check_undivided([written, unquantized])
    found = cover(unquantized, written)
    exact = [f"{re.escape(name)}$" for name in found.rest]
    before = old.get("dynamic")
    more = before if isinstance(before, dict) else {}
    skipped: dict[str, Any] = {f"-:{e}": {} for e in [*expressions(found.candidates), *exact]}
    return (
        {
            "desc_act": False,
            "sym": scheme.symmetric,
            "checkpoint_format": "gptq",
            "lm_head": _head(written),
        }
        | old
        | {
            "bits": scheme.bits,
            "group_size": scheme.group_size or -1,
            "dynamic": skipped | {key: value for key, value in more.items() if key[:2] != "-:"},
        }
    )


def _fp8(old: Config, quantized: Mapping[str, Stored], unquantized: list[str]) -> Config:
    scheme, written = _only(quantized, "fp8"), list(quantized)
    check_undivided([written, unquantized])
    kept = {key: value for key, value in old.items() if key not in EXCEPTIONS}
    static = all("input_scale" in matrix.leaves for matrix in quantized.values())
    if scheme.block_rows > 1:
        kept = {"weight_block_size": [scheme.block_rows, scheme.group_size]} | kept
    return (
        {"activation_scheme": "static" if static else "dynamic", "fmt": "e4m3"}
        | kept
        | {"modules_to_not_convert": names(unquantized, written)}
    )


def _named(old: Config, quantized: Mapping[str, Stored], unquantized: list[str]) -> Config:
    """Formats whose config has nothing but a name and what was there."""
    return dict(old)


def _only(quantized: Mapping[str, Stored], method: str) -> Scheme:
    schemes = {matrix.scheme for matrix in quantized.values() if matrix.scheme is not None}
    if len(schemes) != 1:
        raise UnsupportedError(
            f"a {method} config has one scheme, and the tensors have "
            f"{', '.join(sorted(map(str, schemes))) or 'none that is known'}."
        )
    return schemes.pop()


def _head(written: list[str]) -> bool:
    return any(name.endswith(HEAD) for name in written)
