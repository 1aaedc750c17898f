"""From findings to changes of a draft, round by round, until the rules find nothing more to change.

Only `Remedy.mend` and its data are read. What merely has to be said otherwise is said otherwise
before any tensor is touched, and the whole is judged anew after each round.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gguf2st.engines.base import Deployment
from gguf2st.errors import Gguf2stError
from gguf2st.repairing.draft import (
    Cast,
    Copied,
    Decoded,
    Draft,
    Given,
    PlannedTensor,
    planned,
)
from gguf2st.repairing.experts import STACKED_IN_SGLANG, stacked, unstacked
from gguf2st.repairing.quantization import derived
from gguf2st.verification import Context, Effect, Finding, Mend, Remedy
from gguf2st.verification.checkpoint import QUANTIZATION_FILES
from gguf2st.verification.decoding import Decoding, decoding_of, refusal
from gguf2st.verification.stored import Layout, Stored

# config.json's names of dtypes -> safetensors'
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NAMES = {short: long for long, short in DTYPES.items()}
# What a value of the wrong kind in a stranger's config can cause.
_WRONG_KIND = (TypeError, ValueError, AttributeError, LookupError)
# Two of AWQ's zero points of symmetric codes.
_MIDDLES = b"\x88"


@dataclass(frozen=True)
class Change:
    """What is done with tensors, modules, files or keys of config.json, by which rule, and why."""

    what: Mend
    subjects: tuple[str, ...]
    rule: str
    reason: str


@dataclass
class Mender:
    """Applies findings to a draft. `problems` say what it would have done and couldn't.

    `tied`: a head that is missing is known to be the embedding.
    """

    draft: Draft
    engines: tuple[str, ...] = ()
    tied: bool = False
    changes: list[Change] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)
    matching: bool = False
    fresh: bool = False
    settled: set[str] = field(default_factory=set)

    def apply(self, findings: Sequence[Finding]) -> bool:
        """One round; whether anything changed."""
        wanted = [finding for finding in findings if worth(finding)]
        structure: dict[Mend, Callable[[Finding], bool]] = {
            Mend.MISSING: self._look_elsewhere,
            Mend.DROP: self._drop,
            Mend.INDEX: self._index,
            Mend.RENAME: self._rename,
            Mend.CAST: self._cast,
            Mend.CONFIG: self._config,
        }
        for mend, action in structure.items():
            if any([action(f) for f in wanted if f.remedy.mend is mend]):
                return True
        # Tensors that only the config calls wrong are right when that follows them.
        said = [
            f
            for f in wanted
            if f.remedy.mend in (Mend.MATCH, Mend.DEQUANTIZE)
            or (f.remedy.mend is Mend.MISSING and f.remedy.modules)
        ]
        self.matching |= bool(said)
        if self.matching and self._match(said):
            return True
        if self._dequantize([f for f in said if f.remedy.mend is Mend.DEQUANTIZE]):
            return True
        # What form experts need depends on all of this.
        unnamed = [f for f in wanted if f.remedy.mend is Mend.RENAME and not f.remedy.names]
        return any([self._restack(f) for f in unnamed])

    @property
    def context(self) -> Context:
        """The draft as rules see it."""
        return Context(self.draft.view(), {}, Deployment())

    def _note(self, finding: Finding, subjects: Sequence[str]) -> None:
        mend = finding.remedy.mend
        self.changes.append(Change(mend, tuple(subjects), finding.rule, finding.reason))

    def _drop(self, finding: Finding) -> bool:
        view, done = self.draft.original, []
        for name in finding.subjects:
            holders = self.draft.find(name)
            if name in view.files and name not in self.draft.left_out:
                self.draft.left_out.add(name)
            elif len(holders) > 1:
                said = (view.weight_map or {}).get(name)
                self.draft.drop(name, keep=said if said in holders else holders[-1])
            elif holders:
                self.draft.drop(name)
            else:
                continue
            done.append(name)
        if done:
            self._note(finding, done)
        return bool(done)

    def _index(self, finding: Finding) -> bool:
        if self.draft.reindexed:
            return False
        self.draft.reindexed = True
        self._note(finding, ("model.safetensors.index.json",))
        return True

    def _look_elsewhere(self, finding: Finding) -> bool:
        """Tensors that an index doesn't name, or places in a file that isn't there."""
        view = self.draft.original
        missing = set(finding.subjects)
        modules = set(map(_module, missing))  # quantized ones have other leaves
        adopted = [
            header
            for header in view.strays
            if header.file not in self.draft.shards
            and header.file not in self.draft.left_out
            and modules & set(map(_module, header.tensors))
        ]
        for header in adopted:
            self.draft.shards[header.file] = planned(header)
        places = view.weight_map or {}
        shapes = self._add_shapes(finding)
        displaced = [name for name, file in places.items() if file not in view.files]
        found_again = displaced and all(map(self.draft.find, displaced))
        if not (adopted or (found_again and missing & set(places.values()))):
            return shapes
        if self.draft.reindexed and not adopted:
            return False
        self.draft.reindexed = True
        subjects = [header.file for header in adopted] or displaced
        self.changes.append(
            Change(Mend.INDEX, tuple(subjects), finding.rule, "there, but not where the index says")
        )
        return True

    def _add_shapes(self, finding: Finding) -> bool:
        """Matrices that lack nothing but compressed-tensors' weight_shape."""
        quantized = self.context.quantized if finding.remedy.modules else {}
        done: dict[str, list[PlannedTensor]] = {}
        for name in finding.remedy.modules:
            matrix = quantized.get(name)
            whole = matrix is not None and matrix.layout is Layout.PACKED
            if matrix is not None and whole and "weight_shape" not in matrix.leaves:
                done |= self._beside(matrix, shape_of(matrix))
        self.draft.substitute(done)
        if done:
            self._note(finding, [f"{_module(name)}.weight_shape" for name in done])
        return bool(done)

    def _rename(self, finding: Finding) -> bool:
        held = {name for tensors in self.draft.shards.values() for name in tensors}
        names = {
            old: new for old, new in finding.remedy.names.items() if old in held and new not in held
        }
        self.draft.substitute(
            {old: [replace(self.draft.get(old), name=new)] for old, new in names.items()}
        )
        if names:
            self._note(finding, tuple(names))
        return bool(names)

    def _restack(self, finding: Finding) -> bool:
        context = self.context
        expected = context.expected
        if expected is None or context.prefix != expected.prefix:
            return False
        quantized = any(name in context.quantized for name in map(_module, finding.subjects))
        model_class = context.view.model_class
        apart = quantized or finding.engine == "sglang"
        if not apart and "sglang" in self.engines and not model_class.startswith(STACKED_IN_SGLANG):
            self.problems[finding.subjects[0]] = (
                f"{len(finding.subjects)} unquantized experts would have to be stacked for transformers, and "
                f"SGLang reads those of {model_class} one by one alone; repair for one of both"
            )
            return False
        change = unstacked if apart else stacked
        names = change(self.draft, context, expected.experts)
        if names:
            self._note(finding, names)
        return bool(names)

    def _cast(self, finding: Finding) -> bool:
        """Cast the few to the dtype of the many; where they are the many, the config is wrong."""
        wanted = {n: d for n, d in finding.remedy.values.items() if self.draft.find(n)}
        others = {self.draft.get(name).dtype for name in wanted}
        sizes = {name: self.draft.get(name).nbytes for name in wanted}
        rest = sum(
            tensor.nbytes
            for tensors in self.draft.shards.values()
            for name, tensor in tensors.items()
            if name not in wanted and tensor.dtype in set(wanted.values())
        )
        if sum(sizes.values()) > rest and len(others) == 1 and others <= _NAMES.keys():
            return self._say_dtype(finding, _NAMES[others.pop()])
        done = {}
        for name, dtype in wanted.items():
            tensor = self.draft.get(name)
            if isinstance(tensor.source, Copied) and tensor.dtype != dtype and dtype in _NAMES:
                original = self.draft.origin(name)
                done[name] = [replace(tensor, dtype=dtype, source=Cast(original))]
        self.draft.substitute(done)
        if done:
            self._note(finding, tuple(done))
        return bool(done)

    def _say_dtype(self, finding: Finding, dtype: str) -> bool:
        config = self.draft.config or {}
        found = [
            f"{part}{key}" for part in ("", "text_config.") for key in ("dtype", "torch_dtype")
        ]
        there = [key for key in found if _value(config, key) is not None] or ["dtype"]
        values = {key: dtype for key in there if key not in self.settled}
        return self._say(finding, values)

    def _config(self, finding: Finding) -> bool:
        values = finding.remedy.values
        if not values:
            if self.fresh or not finding.subjects[0].startswith("quantization_config"):
                return False
            self.matching = self.fresh = True
            return self._match([finding])
        if finding.rule == "D-20" and values.keys() <= self.settled:
            # The drafter isn't whole and was switched off: what is there of it goes, too.
            return self._drop(replace(finding, remedy=Remedy("", Mend.DROP)))
        if finding.rule == "D-22" and finding.subjects[0] != "config.json":
            return self._tie(finding)
        return self._say(finding, values)

    def _tie(self, finding: Finding) -> bool:
        """Say that a head that isn't there is the embedding, where something or someone says so.

        A head that got lost looks the same, and would be replaced with another matrix in silence.
        """
        head = finding.subjects[0]
        said = [_value(self.draft.config or {}, key) for key in finding.remedy.values]
        if not self.tied and True not in said:
            self.problems[head] = (
                "it may be lost, or the embedding; take it from the original, or repair with --tied "
                "if you know that the model's head is its embedding"
            )
            return False
        if not self._say(finding, finding.remedy.values):
            return False
        why = "as --tied says" if self.tied else "as one part of config.json says"
        self.assumptions.append(
            f"{head}: {finding.reason}; taken for the embedding, {why}. The output is right only if "
            "the original model's head is its embedding"
        )
        return True

    def _say(self, finding: Finding, values: Mapping[str, Any]) -> bool:
        new = {k: v for k, v in values.items() if k not in self.settled}
        if self.draft.config is None or not new:
            return False
        for key, value in new.items():
            self.draft.set(key, value)
        self.settled |= new.keys()
        self.changes.append(Change(Mend.CONFIG, tuple(new), finding.rule, finding.reason))
        return True

    def _match(self, findings: Sequence[Finding]) -> bool:
        """Derive the quantization_config anew; whether it becomes another."""
        self.problems.pop("quantization_config", None)
        context, draft = self.context, self.draft
        try:
            new = derived(context, fresh=self.fresh)
        except (Gguf2stError, *_WRONG_KIND) as error:
            text = " ".join(str(error).split()).removesuffix("; please report this.")
            self.problems["quantization_config"] = text[:200]
            return False
        if draft.config is None or (new or {}) == dict(context.view.quantization):
            return False
        draft.set_quantization(new)
        if new is None:
            draft.left_out |= set(QUANTIZATION_FILES) & draft.original.files
        known = [c for c in self.changes if c.what in (Mend.MATCH, Mend.DEQUANTIZE)]
        for finding in findings:
            # What later rounds find is what dequantizing made of the config.
            if finding.remedy.mend is not Mend.DEQUANTIZE and not known:
                change = Change(Mend.MATCH, finding.subjects, finding.rule, finding.reason)
                if change not in self.changes:
                    self.changes.append(change)
        return True

    def _dequantize(self, findings: Sequence[Finding]) -> bool:
        quantized, symmetric = self.context.quantized, self._decoding.symmetric
        done: dict[str, list[PlannedTensor]] = {}
        for finding in findings:
            mine, filled = [], []
            for name in finding.remedy.modules:
                matrix = quantized.get(name)
                if matrix is None or any(leaf in done for leaf in matrix.tensors):
                    continue
                if symmetric and finding.rule == "D-31" and "qzeros" not in matrix.leaves:
                    done |= self._beside(matrix, zero_points(matrix))
                    filled.append(f"{name}.qzeros")
                elif reason := self._decode(matrix, done):
                    self.problems[name] = reason
                else:
                    mine.append(name)
            if mine:
                self._note(finding, mine)
            if filled:
                self.changes.append(
                    Change(Mend.MISSING, tuple(filled), finding.rule, finding.reason)
                )
        self.draft.substitute(done)
        return bool(done)

    def _beside(self, matrix: Stored, tensor: PlannedTensor) -> dict[str, list[PlannedTensor]]:
        """A further tensor of a matrix, in the file of its first."""
        first = matrix.tensors[0]
        return {first: [self.draft.get(first), tensor]}

    @cached_property
    def _decoding(self) -> Decoding:
        return decoding_of(self.draft.original.quantization)

    def _decode(self, matrix: Stored, done: dict[str, list[PlannedTensor]]) -> str:
        """Plan the dense weight, or say why that can't be."""
        decoding = self._decoding
        reason = refusal(matrix, decoding)
        if reason:
            return reason
        given = {n for n in matrix.tensors if isinstance(self.draft.get(n).source, Given)}
        try:
            leaves = {
                leaf: self.draft.origin(tensor.name)
                for leaf, tensor in matrix.leaves.items()
                if tensor.name not in given
            }
        except LookupError as error:
            return f"{error.args[0]} is made anew and can't be decoded"
        dense = PlannedTensor(
            f"{matrix.name}.weight",
            self.dtype,
            matrix.shape,
            Decoded(replace(matrix, leaves=leaves), decoding),
        )
        first, *others = matrix.tensors
        done |= {first: [dense]} | {name: [] for name in others}
        return ""

    @cached_property
    def dtype(self) -> str:
        """Of dequantized weights: config.json's dtype, or what most unquantized weights have."""
        config = self.draft.original
        for section in (config.config, config.text_config):
            for key in ("dtype", "torch_dtype"):
                if section.get(key) in ("bfloat16", "float16"):
                    return DTYPES[section[key]]
        sizes = dict.fromkeys(("BF16", "F16"), 0)
        for tensor in config.tensors.values():
            if tensor.dtype in sizes:
                sizes[tensor.dtype] += tensor.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype])


def worth(finding: Finding) -> bool:
    """Whether a finding is mended: what engines stumble over, and what costs no weight."""
    mend = finding.remedy.mend
    if finding.fatal:
        return mend is not Mend.NOTHING
    if finding.effect is Effect.RISK:
        if mend is Mend.DROP:
            return all(name.endswith((".safetensors", ".json")) for name in finding.subjects)
        return mend not in (Mend.NOTHING, Mend.MISSING, Mend.RENAME)
    return finding.effect is Effect.NOTE and mend is Mend.INDEX


def zero_points(matrix: Stored) -> PlannedTensor:
    """AWQ's qzeros of a symmetric matrix: 8 for all."""
    rows, words = matrix.leaves["scales"].shape[0], matrix.leaves["qweight"].shape[1]
    data = Given(_MIDDLES * (4 * rows * words))
    return PlannedTensor(f"{matrix.name}.qzeros", "I32", (rows, words), data)


def shape_of(matrix: Stored) -> PlannedTensor:
    """compressed-tensors' weight_shape."""
    data = Given(struct.pack("<2q", *matrix.shape))
    return PlannedTensor(f"{matrix.name}.weight_shape", "I64", (2,), data)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _value(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
