"""How the parameters of a model class are written down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

# More than any model has; a hostile config could ask for a list that fills the memory.
MOST = {"layers": 1024, "experts": 8192, "width": 1 << 27}


class Part(StrEnum):
    """What of a model a parameter belongs to."""

    TEXT = "text"
    MTP = "mtp"
    VISION = "vision"


class FieldError(Exception):
    """A field of config.json that a parameter's shape needs isn't there, or isn't a size."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the unquantized model, as transformers' save_pretrained names it.

    `linear` weights may be quantized instead. `optional` ones may be missing.
    """

    name: str
    shape: tuple[int, ...]
    part: Part = Part.TEXT
    linear: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Experts:
    """The experts of a block, which lie one by one or stacked.

    `each` are the patterns ("...experts.{}.gate_proj") and shapes of one expert's matrices,
    `stacked` the tensors that hold all of them, with their shapes; both without ".weight".
    """

    path: str
    count: int
    each: tuple[tuple[str, tuple[int, int]], ...]
    stacked: tuple[tuple[str, tuple[int, ...]], ...]
    part: Part = Part.TEXT

    def single(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Every matrix by its name."""
        for expert in range(self.count):
            for pattern, shape in self.each:
                yield pattern.format(expert), shape


@dataclass(frozen=True)
class Expected:
    """All parameters of a model class. `prefix` is what the names of the text part begin with."""

    parameters: Mapping[str, Parameter]
    experts: tuple[Experts, ...] = ()
    prefix: str = "model."
    tied: bool = False

    @cached_property
    def columns(self) -> Mapping[str, int]:
        """Module that may be quantized -> number of its inputs."""
        found = {
            name.removesuffix(".weight"): parameter.shape[-1]
            for name, parameter in self.parameters.items()
            if parameter.linear
        }
        for block in self.experts:
            found.update({name: shape[1] for name, shape in block.single()})
        return found


@dataclass
class Builder:
    """Collects parameters from the sizes of a config."""

    config: Mapping[str, Any]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    experts: list[Experts] = field(default_factory=list)
    part: Part = Part.TEXT

    def size(self, name: str, default: int | None = None, most: str = "width") -> int:
        """A size of the config. Raises `FieldError`."""
        value = self.config.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST[most]:
            what = "isn't there" if value is None else f"is {str(value)[:40]}"
            raise FieldError(f"{name} {what}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A yes or no of the config."""
        value = self.config.get(name)
        return default if value is None else bool(value)

    def add(self, name: str, *shape: int, optional: bool = False) -> None:
        """A parameter that is no linear layer's weight."""
        self.parameters[name] = Parameter(name, shape, self.part, optional=optional)

    def linear(self, name: str, out: int, columns: int, *, bias: bool = False) -> None:
        """A linear layer."""
        weight = f"{name}.weight"
        self.parameters[weight] = Parameter(weight, (out, columns), self.part, linear=True)
        if bias:
            self.add(f"{name}.bias", out)

    def norm(self, name: str, width: int, *, bias: bool = False) -> None:
        """A normalization."""
        self.add(f"{name}.weight", width)
        if bias:
            self.add(f"{name}.bias", width)

    def done(self, prefix: str, *, tied: bool) -> Expected:
        """All that was collected."""
        return Expected(self.parameters, tuple(self.experts), prefix, tied)
