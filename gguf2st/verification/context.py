"""What rules look at: the checkpoint, the engines asked for, and what these make of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gguf2st.engines import ENGINES, configs
from gguf2st.engines.base import Checkpoint, Deployment, Engine, EngineModule, Outcome
from gguf2st.engines.patterns import REGEX
from gguf2st.scheme import Scheme
from gguf2st.verification.checkpoint import CheckpointView
from gguf2st.verification.expected import Expected, FieldError, expected_parameters
from gguf2st.verification.header import Tensor
from gguf2st.verification.stored import Hints, Stored, stored_matrices


@dataclass(frozen=True)
class LayerReading:
    """A layer that an engine builds, what is stored for it, and what the engine takes it for.

    `stored` are the matrices of `module.shards`, in that order. `unexcepted` is what the engine
    would take the layer for if no exceptions (ignore) were written.
    """

    module: EngineModule
    stored: tuple[Stored, ...]
    outcome: Outcome
    unexcepted: Outcome

    @cached_property
    def quantized(self) -> tuple[Stored, ...]:
        """Those that hold codes."""
        return tuple(matrix for matrix in self.stored if matrix.quantized)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors of the layer."""
        return tuple(name for matrix in self.stored for name in matrix.tensors)


EXCEPTIONS = ("ignore", "modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True)
class Context:
    """A checkpoint and a request. All properties are computed once, when first asked for."""

    view: CheckpointView
    engines: Mapping[str, Engine]
    deployment: Deployment
    answers: dict[str, Any] = field(default_factory=dict)  # what rules share

    def known(self, engine: str) -> bool:
        """Whether that engine's layers of the model class are written down."""
        return (
            engine in self.engines and self.view.model_class in self.engines[engine].model_classes()
        )

    @cached_property
    def expected(self) -> Expected | None:
        """All parameters of the model class, or None where that, or a size of it, isn't known."""
        return self._expected[0]

    @cached_property
    def field_error(self) -> str:
        """What is wrong with a field of config.json that the parameters depend on, or ""."""
        return self._expected[1]

    @cached_property
    def _expected(self) -> tuple[Expected | None, str]:
        try:
            return expected_parameters(self.view.model_class, self.view.config), ""
        except FieldError as error:
            return None, str(error)

    @cached_property
    def prefix(self) -> str:
        """What the names of the text part really begin with: "model." for "model.layers.0..."."""
        if self.expected is None:
            return ""
        expected, found = self.expected.prefix, Counter[str]()
        ends = {
            name.removeprefix(f"{expected}layers.0.")
            for name in (*self.expected.parameters, *_first_experts(self.expected))
            if name.startswith(f"{expected}layers.0.")
        }
        for name in self.view.tensors:
            before, middle, rest = name.partition("layers.0.")
            module = rest.rpartition(".")[0]
            if middle and (rest in ends or f"{module}.weight" in ends):
                found[before] += 1
        for other in ("mtp.", "model.visual.", "visual."):
            del found[other]
        return found.most_common(1)[0][0] if found else expected

    def canonical(self, name: str) -> str:
        """A tensor's or module's name with the prefix that the model class has."""
        if self.expected is None or self.prefix == self.expected.prefix:
            return name
        if name.startswith(self.prefix) and not name.startswith(
            ("lm_head.", "mtp.", "model.visual.")
        ):
            return self.expected.prefix + name.removeprefix(self.prefix)
        return name

    @cached_property
    def canonical_tensors(self) -> Mapping[str, Tensor]:
        """All tensors by their canonical names."""
        return {self.canonical(name): tensor for name, tensor in self.view.tensors.items()}

    @cached_property
    def canonical_stored(self) -> Mapping[str, Stored]:
        """All matrices by their canonical names."""
        return {self.canonical(name): matrix for name, matrix in self.stored.items()}

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """Names and expressions of the config that except modules from quantization."""
        found: list[str] = []
        for key in EXCEPTIONS:
            listed = self.view.quantization.get(key)
            if isinstance(listed, list):
                found += [entry for entry in listed if isinstance(entry, str)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def bad_expressions(self) -> Mapping[str, str]:
        """Entries and targets that are no regular expressions -> why."""
        found = {}
        for entry in (*self.entries, *self.targets):
            if entry.startswith(REGEX):
                try:
                    re.compile(entry[len(REGEX) :])
                except (re.error, OverflowError, RecursionError) as error:
                    found[entry] = str(error)
        return found

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """All targets of compressed-tensors' groups."""
        groups = self.view.quantization.get("config_groups")
        found: list[str] = []
        for group in groups.values() if isinstance(groups, dict) else ():
            listed = group.get("targets") if isinstance(group, dict) else None
            found += [t for t in listed if isinstance(t, str)] if isinstance(listed, list) else []
        return tuple(dict.fromkeys(found))

    @cached_property
    def schemes(self) -> tuple[Scheme, ...]:
        """Schemes that the quantization_config describes; none where it can't be read."""
        config, method = self.view.quantization, self.view.method
        try:
            if method == "compressed-tensors":
                groups = configs.groups_by_target(config).values()
                return tuple(dict.fromkeys(group.scheme for group in groups))
            if method in ("awq", "gptq"):
                return (configs.integer_scheme(config),)
            if method == "fp8":
                return (configs.fp8_scheme(config),)
            if method == "mxfp4":
                return (configs.STACKED_MXFP4,)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass
        return ()

    @cached_property
    def readable(self) -> bool:
        """Whether the quantization_config can be matched with names at all."""
        known = self.schemes or self.view.method in ("", "w4afp8")
        return bool(known) and not self.bad_expressions

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """All matrices by their module's name."""
        known = self.expected.columns if self.expected is not None else {}
        modules = {name.rpartition(".")[0] for name in self.view.tensors}
        columns = {
            name: known[self.canonical(name)] for name in modules if self.canonical(name) in known
        }
        first = self.schemes[0] if self.schemes else Scheme("int", 4, 0)
        groups = frozenset(scheme.group_size for scheme in self.schemes)
        hints = Hints(self.view.method, first.bits, first.symmetric, groups, columns)
        return stored_matrices(self.view.tensors.values(), hints)

    @cached_property
    def quantized(self) -> Mapping[str, Stored]:
        """Those that hold codes."""
        return {name: matrix for name, matrix in self.stored.items() if matrix.quantized}

    def layers(self, engine: str) -> Sequence[LayerReading]:
        """The engine's layers, what lies there for them, and what it takes them for.

        Empty for a checkpoint without quantization_config, a class that isn't known and a
        config that can't be read.
        """
        return self._readings.get(engine, ())

    def unknown_modules(self, engine: str) -> Sequence[Stored]:
        """Matrices that become no linear layer of the engine."""
        return self._unplaced.get(engine, ())

    def placed(self, engine: str) -> Mapping[str, EngineModule | None]:
        """Module of the checkpoint -> layer of an engine, whether asked for or not."""
        if engine not in self._placements:
            model_class = self.view.model_class
            known = model_class in ENGINES[engine].model_classes()
            names = list(self.stored)
            self._placements[engine] = (
                ENGINES[engine].module_names(model_class, names) if known else {}
            )
        return self._placements[engine]

    @cached_property
    def _placements(self) -> dict[str, Mapping[str, EngineModule | None]]:
        return {}

    @cached_property
    def _unplaced(self) -> Mapping[str, tuple[Stored, ...]]:
        return {
            engine: tuple(
                self.stored[name] for name, module in self.placed(engine).items() if module is None
            )
            for engine in self.engines
        }

    @cached_property
    def _readings(self) -> Mapping[str, tuple[LayerReading, ...]]:
        if not (self.view.method and self.readable):
            return {}
        config = {**self.view.quantization, "quant_method": self.view.method}
        without = {key: value for key, value in config.items() if key not in EXCEPTIONS}
        plain = [
            tensor
            for name, tensor in ((t.rpartition(".")[0], t) for t in self.view.tensors)
            if name not in self.quantized
        ]
        headers = Checkpoint(frozenset(self.quantized), plain)
        # An AWQ config without exceptions gets some from the headers: that is what "modules" mean.
        if self.view.method == "awq":
            without["modules_to_not_convert"] = ["\0"]
        found = {}
        for name, engine in self.engines.items():
            modules = self.placed(name)
            if not modules or self.view.method in engine.unchecked:
                continue
            readings = []
            for module in {id(m): m for m in modules.values() if m is not None}.values():
                readings.append(
                    LayerReading(
                        module,
                        tuple(self.stored[shard] for shard in module.shards),
                        engine.outcome(self.view.model_class, module, config, headers),
                        engine.outcome(self.view.model_class, module, without, headers),
                    )
                )
            found[name] = tuple(readings)
        return found

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Shape (out, in) of each matrix."""
        return {name: matrix.shape for name, matrix in self.stored.items()}


def _first_experts(expected: Expected) -> list[str]:
    found = []
    for block in expected.experts[:1]:
        found += [f"{pattern.format(0)}.weight" for pattern, _ in block.each]
        found += [name for name, _ in block.stacked]
    return found


def agree(stored: Scheme | None, read: Scheme | None, method: str) -> bool:
    """Whether an engine takes a matrix for what its tensors are; they don't tell activations."""
    if stored is None or read is None:
        return stored is read
    return configs.same_scheme(
        stored, replace(read, activation_bits=stored.activation_bits), method
    )
