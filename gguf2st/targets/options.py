"""What a user can choose about a format, and what a format lets them choose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gguf2st.errors import UsageError

# TargetOptions.dtype -> safetensors' name, config.json's name
DTYPES = {"bf16": ("BF16", "bfloat16"), "f16": ("F16", "float16")}


@dataclass(frozen=True)
class TargetOptions:
    """What a user can choose about a format; None leaves the choice to the format.

    `group_size` 0 is the whole row. `dtype` is "bf16" or "f16": unquantized tensors
    and scales. `mixed` gives modules whose name holds a regular expression a scheme of
    their own, the first that matches: (("self_attn", "int8-g32"), ("down_proj", "int8")).
    """

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    variant: str | None = None
    dtype: str | None = None
    mixed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Choices:
    """The values of each option that a format takes, its default first; none: no such option.

    A format that takes `mixed` schemes has a configuration that can tell them apart.
    """

    bits: tuple[int, ...] = ()
    group_size: tuple[int, ...] = ()
    symmetric: tuple[bool, ...] = ()
    variant: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    mixed: bool = False

    def group_sizes(self, options: TargetOptions) -> tuple[int, ...]:
        """Group sizes to try, the preferred first: the user's, or all but the whole row."""
        if options.group_size is not None:
            return (options.group_size,)
        return tuple(size for size in self.group_size if size)

    def settle(self, name: str, options: TargetOptions) -> Settled:
        """The options with defaults for what was left open.

        Raises `UsageError` listing the choices of format `name` for a value that it
        doesn't have.
        """
        if options.mixed and not self.mixed:
            raise UsageError(
                f"{name} has one scheme for all modules; leave --scheme out, or use --to compressed-tensors."
            )
        for option, label in _LABELS.items():
            value, choices = getattr(options, option), getattr(self, option)
            if value is None or value in choices:
                continue
            if not choices:
                raise UsageError(f"{name} has no choice of {label}; leave it out.")
            raise UsageError(f"{name} takes {label} {_listed(choices)}, not {_shown(value)}.")
        defaults = {
            option: getattr(self, option)[0]
            for option in _LABELS
            if getattr(options, option) is None and getattr(self, option)
        }
        settled = replace(options, **defaults)
        return Settled(
            settled.bits or 0,
            settled.group_size or 0,
            settled.symmetric is not False,
            settled.variant or "",
            *DTYPES[settled.dtype or "bf16"],
        )


@dataclass(frozen=True)
class Settled:
    """Options of a format after its defaults; `dtype` is safetensors' name."""

    bits: int
    group_size: int
    symmetric: bool
    variant: str
    dtype: str
    torch_dtype: str


@dataclass(frozen=True)
class MixedScheme:
    """Integers of a user's own choice for modules whose name holds `pattern`."""

    pattern: re.Pattern[str]
    bits: int
    group_size: int | None
    symmetric: bool | None


def mixed_scheme(pattern: str, text: str) -> MixedScheme:
    """Parse a scheme such as int8, int4-g32, int8-channel or int4-g64-asym. Raises `UsageError`."""
    found = re.fullmatch(r"int([48])(?:-(?:g(32|64|128)|(channel)))?(?:-(a?sym))?", text)
    if found is None:
        raise UsageError(
            f"--scheme {pattern}={text}: {text!r} isn't a scheme; write int4 or int8, then -g128, -g64, "
            "-g32 or -channel, then -sym or -asym, such as int8-g32."
        )
    bits, group, channel, symmetry = found.groups()
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"--scheme {pattern}={text}: {pattern!r} isn't a regular expression ({error})."
        ) from error
    size = 0 if channel else int(group) if group else None
    return MixedScheme(compiled, int(bits), size, None if symmetry is None else symmetry == "sym")


_LABELS = {
    "bits": "bits",
    "group_size": "group size",
    "symmetric": "symmetry",
    "variant": "variant",
    "dtype": "dtype",
}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "symmetric" if value else "asymmetric"
    return str(value)


def _listed(choices: Sequence[Any]) -> str:
    *first, last = [_shown(choice) for choice in choices]
    return f"{', '.join(first)} or {last}" if first else last
