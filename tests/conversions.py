"""The models that the fixtures make up, and their conversions: each is run once per process."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import gguf2st
from tests.oracles.inverse import File

FIXTURES = Path(__file__).parents[1] / "fixtures"
# Written as float32 whatever the output format: engines compute with them in float32.
KEPT_FLOAT32 = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")
_OUTPUTS = tempfile.TemporaryDirectory(prefix="gguf2st-")


@dataclass(frozen=True)
class Case:
    """A GGUF model of a fixture folder, with the files given beside it."""

    model: Path
    mmproj: Path | None = None
    mtp: Path | None = None
    exact: bool = False  # nothing was rounded on the way to the GGUF
    has_mtp: bool = False

    @property
    def folder(self) -> Path:
        return self.model.parent

    def __str__(self) -> str:
        return "+".join(file.stem for file in (self.model, self.mmproj, self.mtp) if file)


@cache
def cases() -> tuple[Case, ...]:
    """Every model alone, the first of a folder with each mmproj, trunks with their MTP file."""
    found = []
    for folder in sorted(listing.parent for listing in FIXTURES.glob("*/original.json")):
        models, projectors, drafts = _by_role(folder)
        found += models
        for projector, exact in projectors:
            first = models[0]
            found.append(_with(first, mmproj=projector, exact=first.exact and exact))
        for draft, exact in drafts:
            for model in models:
                if not model.has_mtp:
                    found.append(_with(model, mtp=draft, exact=model.exact and exact, has_mtp=True))
    return tuple(found)


def one_per_folder(among: Iterable[Case]) -> list[Case]:
    """The last model of each folder, without mmproj: all of a folder hold the same model.

    The last, because llama.cpp can't read every old form any more; those have longer names.
    """
    return list({case.folder: case for case in among if not (case.mmproj or case.mtp)}.values())


def _with(case: Case, **changes: object) -> Case:
    return Case(**(vars(case) | changes))


def _by_role(folder: Path) -> tuple[list[Case], list[tuple[Path, bool]], list[tuple[Path, bool]]]:
    models, projectors, drafts = [], [], []
    for path in sorted(folder.glob("*.gguf")):
        file = File(path)
        if file.key("split.no", 0) > 0:
            continue
        # NVFP4 and gpt-oss's MXFP4 are only repacked; of others MXFP4 is made with Q8_0 beside it.
        exact = set(file.kinds.values()) <= {"F32", "BF16", "NVFP4", "MXFP4"}
        mtp = bool(file.key("{}.nextn_predict_layers", 0))
        if file.key("general.architecture") == "clip":
            projectors.append((path, exact))
        elif mtp and "blk.0.attn_norm.weight" not in file.kinds:
            drafts.append((path, exact))
        else:
            models.append(Case(path, exact=exact, has_mtp=mtp))
    return models, projectors, drafts


def converted(case: Case, to: str = "bf16") -> Path:
    """The directory that gguf2st makes of a case."""
    return _converted(case, to)


@cache
def _converted(case: Case, to: str) -> Path:
    output = Path(_OUTPUTS.name) / f"{case}-{to}"
    gguf2st.convert(case.model, output, mmproj=case.mmproj, mtp=case.mtp, to=to, threads=2)
    return output


def load(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def importance(model: gguf2st.GgufModel, spread: float = 2.5) -> dict[str, np.ndarray]:
    """A random E[x^2] for every matrix, over many orders of magnitude; one row for each expert."""
    random = np.random.default_rng(7)
    found = {}
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            shape = (*tensor.shape[:-2], tensor.columns)
            found[tensor.name] = np.exp(random.normal(0, spread, shape)).astype(np.float32)
    return found
