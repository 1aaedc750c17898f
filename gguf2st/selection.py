"""Which matrices a plan quantizes, and with which scheme: one for each fused group."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gguf2st.checkpoint.config import build_config
from gguf2st.checkpoint.writer import spec_bytes
from gguf2st.engines import ENGINES, Deployment, EngineRules, engine_named
from gguf2st.errors import UnsupportedError, UsageError
from gguf2st.expressions import check_used, compiled, matches
from gguf2st.ladder import Step, preferred, rung_of_level, rungs_for, steps
from gguf2st.mapping import Recipe, Resolution
from gguf2st.modules import Module, keeps_blocks, modules_of
from gguf2st.options import PlanOptions
from gguf2st.targets import DTYPE_BYTES, Quantized, Scheme, Target, target_named

HEAD = "lm_head"
# Share of the weights that an only scheme has to reach, of what another could.
NEARLY_ALL = 0.95


@dataclass(frozen=True)
class Kept:
    """A matrix that stays unquantized although the format could quantize it, and why."""

    name: str
    reason: str


class Selection:
    """Decides for every matrix of a model.

    `modules` are quantized, `kept` stay as they are; `engines` are those asked for that take
    the format. `steps` lead from the smallest plan, which it is for a budget, to more exact
    ones; `climb` takes them. Raises `UnsupportedError` when an
    engine that was asked for takes the format not at all.
    """

    def __init__(self, resolution: Resolution, target: Target, options: PlanOptions) -> None:
        self.kept: list[Kept] = []
        self.modules: list[tuple[Module, Quantized]] = []
        self.warnings: list[str] = []
        self.engines: tuple[str, ...] = options.engines or tuple(ENGINES)
        self.steps: list[Step] = []
        self._target, self._options = target, options
        self._by_recipe: dict[str, list[tuple[Module, Quantized]]] = {}
        self._all: dict[str, Module] = {}
        self._refusals: dict[tuple[str, Scheme], str | None] = {}
        self._rungs = rungs_for(target, options)
        self._schemes = list(dict.fromkeys(s for rung in self._rungs for s in rung))
        self._schemes = self._schemes or list(target.schemes())
        if not target.schemes():
            return
        self._keep = compiled("--keep", options.keep)
        self._quantize = compiled("--quantize", options.quantize)
        self._all = {m.name: m for recipe in resolution.recipes for m in modules_of(recipe)}
        for option, patterns in (
            ("--keep", self._keep),
            ("--quantize", self._quantize),
            ("--scheme", [re.compile(pattern) for pattern, _ in options.target.mixed]),
        ):
            check_used(option, patterns, self._all)
        self._rules = self._engine_rules(resolution)
        self._groups = self._joined()
        self._priorities = [_priority(group) for group in self._groups]
        self._early_warnings = tuple(self.warnings)
        if options.bits_per_weight is not None:
            self.steps = self._all_steps()
        self.climb(0)

    def climb(self, count: int) -> None:
        """Decide anew, with that many of the steps taken."""
        self.kept, self.modules, self._by_recipe = [], [], {}
        self.warnings = list(self._early_warnings)
        rungs = self._chosen_rungs(count)
        shared = None
        if self._target.uniform:
            shared = self._shared_scheme(max(rungs, default=0))
        for group, rung in zip(self._groups, rungs, strict=True):
            self._decide(group, self._schemes_for(group, rung, shared))
        used = {quantized.scheme for _, quantized in self.modules}
        by_size = bool(self._rungs) or self._target.by_type
        noted = [s for s in self._schemes if s in used or not by_size]
        self.warnings += [*self._rules.notes(noted), *self._lowered(rungs)]
        self._check_activation_scales()

    def quantized_modules(self, recipe: Recipe) -> list[tuple[Module, Quantized]]:
        """Modules of a recipe that are quantized; empty when it stays as it is."""
        return self._by_recipe.get(recipe.name, [])

    def unquantized_names(self) -> list[str]:
        """Names of all matrices that stay as they are.

        With them a head that has no tensor: engines build one that shares the embedding's.
        """
        quantized = {module.name for module, _ in self.modules}
        return [name for name in dict.fromkeys([*self._all, HEAD]) if name not in quantized]

    def check(self, quantization: dict[str, Any] | None) -> list[str]:
        """Match the written configuration with each engine's own rules against its own names.

        Returns warnings. Raises `UnsupportedError` for a checkpoint that would contradict itself.
        """
        if quantization is None:
            return []
        schemes = {quantized.name: quantized.scheme for _, quantized in self.modules}
        unquantized = self.unquantized_names()
        problems = self._rules.contradictions(schemes, unquantized, quantization)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise UnsupportedError(
                f"the {self._target.name} configuration would contradict its tensors: {problems[0]}{more}; "
                "narrow --engine, or change --keep or --quantize."
            )
        # Speculative decoding alone would fail, and the model serves without it.
        return self._rules.contradictions(schemes, unquantized, quantization, drafter=True)

    def _check_activation_scales(self) -> None:
        given = self._options.activation_scales
        scaled = self._target.statically_scaled([quantized for _, quantized in self.modules])
        if given is not None and not set(given) & set(scaled):
            which = (
                f"none names such a module as {scaled[0]}"
                if scaled
                else "the format has no place for them"
            )
            raise UsageError(f"--activation-scales are of no use to {self._target.name}: {which}.")
        missing = [name for name in scaled if name not in (given or {})]
        if missing:
            self.warnings.append(
                f"{len(missing)} modules such as {missing[0]} get the static activation scale 1 without a "
                "measured one (--activation-scales): activations beyond 448 are cut off, and those below "
                "0.002 vanish"
            )

    def _engine_rules(self, resolution: Resolution) -> EngineRules:
        options, target = self._options, self._target
        classes = resolution.table.classes[resolution.variant]
        model_class = classes["class"].fill(resolution.text)
        deployment = Deployment(
            options.tensor_parallel, options.compute_capability, dtype=target.torch_dtype
        )
        config = build_config(resolution, target.torch_dtype)

        def rules(names: Iterable[str]) -> EngineRules:
            engines = [engine_named(name) for name in names]
            return EngineRules(engines, model_class, target.name, deployment, config)

        chosen = list(options.engines or ENGINES)
        experts = any(".experts." in name for name in self._all)
        # An engine that takes the most exact rung alone wouldn't load what all others are for.
        lowest = self._rungs[0] if self._rungs else self._schemes
        refusals = rules(chosen).target_refusals(lowest, experts=experts)
        for title, reason in refusals.items():
            if options.engines is not None:
                raise UnsupportedError(
                    f"{title} doesn't take {target.name} for {model_class}: {reason}"
                )
            self.warnings.append(f"{title} won't load this: {reason}")
        left = [name for name in chosen if engine_named(name).title not in refusals]
        if not left:
            raise UnsupportedError(
                f"no engine takes {target.name} for {model_class}: {'; '.join(refusals.values())}"
            )
        self.engines = tuple(left)
        result = rules(left)
        if result.unknown:
            self.warnings.append(
                f"rules of {' and '.join(result.unknown)} for {model_class} aren't known, so they "
                "weren't checked"
            )
        return result

    def _joined(self) -> list[list[Module]]:
        """Modules that must share a scheme: partners in the table, or in some engine."""
        joined: dict[str, str] = {}

        def root(name: str) -> str:
            while joined.setdefault(name, name) != name:
                joined[name] = joined[joined[name]]
                name = joined[name]
            return name

        for module in self._all.values():
            if module.fused is not None:
                # A group of the table is one more node, which no module is named like.
                joined[root(module.name)] = root(f"group {module.fused}")
        for partners in self._rules.partners(list(self._all)):
            for name in partners[1:]:
                joined[root(name)] = root(partners[0])
        groups: dict[str, list[Module]] = {}
        for name, module in self._all.items():
            groups.setdefault(root(name), []).append(module)
        return list(groups.values())

    def _reason_to_keep(self, module: Module) -> str | None:
        if matches(self._keep, module.name):
            return "kept on request"
        reason = module.recipe.unquantized
        if reason is not None and matches(self._quantize, module.name):
            return self._rules.never(module.name)
        return reason

    def _chosen_rungs(self, count: int) -> list[int]:
        """The rung of each group; 0 where there are none to choose from."""
        if self._options.quality is not None:
            return [rung_of_level(self._options.quality, p) for p in self._priorities]
        rungs = [0] * len(self._groups)
        for step in self.steps[:count]:
            for group in step.groups:
                rungs[group] = step.rung
        return rungs

    def _all_steps(self) -> list[Step]:
        sizes = []
        for rung in range(len(self._rungs)):
            shared = self._shared_scheme(rung) if self._target.uniform else None
            sizes.append([self._bytes_on(group, rung, shared) for group in self._groups])
        return steps(sizes, self._priorities, self._units())

    def _units(self) -> list[Sequence[int]]:
        """Groups, by number, that must stand on the same rung."""
        everything = range(len(self._groups))
        if self._target.uniform:
            return [everything]
        experts: list[int] = []
        if self._rules.experts_alike(self._schemes[0]):
            experts = [n for n in everything if ".experts." in self._groups[n][0].name]
        single: list[Sequence[int]] = [(n,) for n in everything if n not in set(experts)]
        return [*single, experts] if experts else single

    def _bytes_on(self, group: Sequence[Module], rung: int, shared: Scheme | None) -> int:
        """Bytes of the tensors of a group on a rung."""
        scheme = None
        if not any(map(self._reason_to_keep, group)):
            offered = self._schemes_for(group, rung, shared)
            scheme = next((s for s in offered if self._refusal(group, s) is None), None)
        nbytes = 0
        for (shape, experts), count in Counter((m.shape, m.experts) for m in group).items():
            if scheme is None:
                nbytes += (
                    count * (experts or 1) * math.prod(shape) * DTYPE_BYTES[self._target.dtype]
                )
            else:
                specs = self._target.tensors(Quantized("", shape, scheme, experts))
                nbytes += count * sum(map(spec_bytes, specs))
        return nbytes

    def _lowered(self, rungs: Sequence[int]) -> list[str]:
        """What is less exact than its level says, as an engine or a shape refuses that."""
        written = {quantized.name: quantized.scheme for _, quantized in self.modules}
        lowered: dict[str, list[str]] = {}
        for group, rung in zip(self._groups, rungs, strict=True):
            scheme, wanted = written.get(group[0].name), self._rungs[rung][0] if rung else None
            if scheme and wanted and scheme not in preferred(self._rungs[rung:], 0):
                reason = self._refusal(group, wanted) or f"the others of this format are {scheme}"
                lowered.setdefault(f"{scheme} and not {wanted} ({reason})", []).append(
                    group[0].name
                )
        return [
            f"{len(names)} groups of matrices such as that of {names[0]} are {what}"
            for what, names in lowered.items()
        ]

    def _schemes_for(
        self, group: Sequence[Module], rung: int, shared: Scheme | None
    ) -> Sequence[Scheme]:
        """Schemes for modules that must share one: the finest that any of them is given."""
        if self._rungs and any(map(_on_request, group)):
            return [s for s in ([shared] if shared else self._schemes) if s.bits >= 8]
        if shared or self._rungs:
            return [shared] if shared else preferred(self._rungs, rung)
        by_type = self._target.by_type
        offered = [
            self._target.schemes_for(module.name, module.block_types() if by_type else ())
            for module in group
        ]
        if not all(offered):
            return ()
        common = [s for s in offered[0] if all(s in others for others in offered)]
        if by_type:
            return [s for s in common if not s.needs_maximum or keeps_blocks(group, s)]
        if common:
            return common
        return max(
            offered, key=lambda s: (s[0].bits, -s[0].group_size if s[0].group_size else -math.inf)
        )

    def _shared_scheme(self, rung: int) -> Scheme:
        """The scheme for a checkpoint that has only one.

        The first that reaches nearly as many weights as any other does: smaller groups
        cost every matrix bits, so a few small ones aren't worth them.
        """
        schemes = preferred(self._rungs, rung) if self._rungs else self._schemes
        candidates = [g for g in self._groups if not any(map(self._reason_to_keep, g))]
        reached = {
            scheme: sum(
                math.prod(module.shape)
                for group in candidates
                if self._refusal(group, scheme) is None
                for module in group
            )
            for scheme in schemes
        }
        first = schemes[0]
        chosen = next(s for s, n in reached.items() if n >= NEARLY_ALL * max(reached.values()))
        if chosen != first:
            self.warnings.append(
                f"{first} would leave {1 - reached[first] / reached[chosen]:.0%} of the weights "
                f"unquantized that {chosen} reaches, and {self._target.name} has one scheme for all"
            )
        return chosen

    def _decide(self, group: Sequence[Module], schemes: Sequence[Scheme]) -> None:
        reasons = {module.name: self._reason_to_keep(module) for module in group}
        forced = next((name for name, reason in reasons.items() if reason is not None), None)
        if forced is not None:
            partner = f"an engine joins it with {forced}, which stays as it is"
            self.kept += [Kept(name, reason or partner) for name, reason in reasons.items()]
            return
        refusals: list[str] = []
        for scheme in schemes:
            refusal = self._refusal(group, scheme)
            if refusal is None:
                self._accept(group, scheme)
                return
            refusals.append(refusal)
        if not schemes and self._rungs:
            refusals = ["it needs 8 bits, which this format can't mix with 4"]
        elif not schemes:
            types = sorted({name for module in group for name in module.block_types()})
            refusals = [
                f"{' and '.join(types) or 'changed values'} lie on no grid of {self._target.name}"
            ]
        # Of the preferred scheme, the one that the user asked for; but what 128 doesn't divide, 32 may.
        whole = (all(self._divides(module, scheme) for module in group) for scheme in schemes)
        told = next(
            (text for text, fits in zip(refusals, whole, strict=False) if fits), refusals[0]
        )
        self.kept += [Kept(module.name, told) for module in group]

    def _divides(self, module: Module, scheme: Scheme) -> bool:
        return self._target.refusal(module.shape, scheme) is None

    def _accept(self, group: Sequence[Module], scheme: Scheme) -> None:
        for module in group:
            quantized = Quantized(module.name, module.shape, scheme, module.experts)
            self.modules.append((module, quantized))
            self._by_recipe.setdefault(module.recipe.name, []).append((module, quantized))

    def _refusal(self, group: Sequence[Module], scheme: Scheme) -> str | None:
        key = (group[0].name, scheme)
        if key not in self._refusals:
            self._refusals[key] = self._why_not(group, scheme)
        return self._refusals[key]

    def _why_not(self, group: Sequence[Module], scheme: Scheme) -> str | None:
        if not all(module.experts for module in group) and scheme.stacked:
            return "this format has codes of stacked experts alone"
        if any(module.experts for module in group) and not scheme.stacked:
            return "its experts are stacked, and this format stores matrices one by one"
        for shape in dict.fromkeys(module.shape for module in group):
            if reason := self._target.refusal(shape, scheme):
                return reason
        return self._rules.refusal({module.name: module.shape for module in group}, scheme)


def as_read(target: Target, options: PlanOptions, resolution: Resolution) -> Target:
    """The target in the variant that engines read of this architecture.

    Raises `UnsupportedError` where they read it in none, or not in the one asked for.
    """
    formats = resolution.table.quantized
    if formats is None or not target.schemes():
        return target
    variant, family = formats.variants.get(target.name), resolution.table.family
    if variant is None:
        raise UnsupportedError(
            f"{family} models can't be served as {target.name}: {formats.others}; take "
            f"--to {' or --to '.join([*formats.variants, 'bf16'])}."
        )
    if options.target.variant not in (None, variant):
        raise UnsupportedError(
            f"{family} models can't be served as {target.name} of variant {options.target.variant}: "
            f"{formats.others}; leave --variant out."
        )
    return target_named(target.name, replace(options.target, variant=variant))


def _priority(group: Sequence[Module]) -> int | None:
    """The place of a group's class: the first of its matrices'."""
    listed = (m.recipe.priority for m in group if m.recipe.priority is not None)
    return min(listed, default=None)


def _on_request(module: Module) -> bool:
    """Whether a text model's matrix is quantized only as a user wants that: heads, embeddings, routers.

    Measured, 4 bits cost an output head more than half of what they cost all other matrices together.
    """
    return module.recipe.unquantized is not None and module.recipe.component == "text"
