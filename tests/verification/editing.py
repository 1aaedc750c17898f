"""Checkpoints made by hand: load one, change one thing, write it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import gguf2st
from tests.conversions import FIXTURES, load


def base(fixture: str, to: str = "bf16", *, mmproj: bool = False, **options: Any) -> Path:
    """A conversion of a fixture; the same arguments give the same directory."""
    return _base(fixture, to, mmproj, tuple(options.items()))


@cache
def _base(fixture: str, to: str, mmproj: bool, chosen: tuple[tuple[str, Any], ...]) -> Path:
    options = dict(chosen)
    folder = FIXTURES / fixture
    *_, model = sorted(folder.glob(f"{fixture}-*.gguf"))
    name = "-".join([fixture, to, "vision" if mmproj else "text", *map(str, options.values())])
    directory = _directory() / name
    gguf2st.convert(
        model,
        directory,
        mmproj=min(folder.glob("mmproj-*.gguf")) if mmproj else None,
        to=to,
        target=gguf2st.TargetOptions(**options),
        fit="rtn",
    )
    return directory


@cache
def _directory() -> Path:
    import tempfile

    holder = tempfile.TemporaryDirectory(prefix="gguf2st-")
    _KEPT.append(holder)
    return Path(holder.name)


_KEPT: list[Any] = []


@dataclass
class Edit:
    """A checkpoint in memory. `files` are further ones: name -> content (None: leave it out)."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    files: dict[str, Any] = field(default_factory=dict)

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)

    def names(self, *parts: str) -> list[str]:
        """Tensors whose names hold all of these."""
        return [name for name in self.tensors if all(part in name for part in parts)]

    def modules(self, *parts: str) -> list[str]:
        """Modules whose names hold all of these."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.names(*parts)))

    def drop(self, *parts: str) -> None:
        found = self.names(*parts)
        assert found, parts
        for name in found:
            del self.tensors[name]

    def rename(self, change: Callable[[str], str]) -> None:
        self.tensors = {change(name): tensor for name, tensor in self.tensors.items()}

    def dequantize(self, module: str) -> None:
        """Replace packed symmetric integers by a weight."""
        packed, scale = (
            self.tensors[f"{module}.weight_packed"],
            self.tensors[f"{module}.weight_scale"],
        )
        out, columns = self.tensors[f"{module}.weight_shape"].tolist()
        bits = 32 * packed.shape[1] // columns
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        codes = (packed[..., None] >> shifts) & ((1 << bits) - 1)
        codes = codes.reshape(out, columns).float() - (1 << bits - 1)
        weight = codes * scale.float().repeat_interleave(columns // scale.shape[1], 1)
        self.drop(f"{module}.weight_")
        self.tensors[f"{module}.weight"] = weight.to(scale.dtype)

    def pack(
        self, module: str, bits: int = 4, group: int = 32, *, asymmetric: bool = False
    ) -> None:
        """Replace a weight by packed integers, as compressed-tensors lays them out."""
        weight = self.tensors.pop(f"{module}.weight")
        out, columns = weight.shape
        grouped = weight.float().reshape(out, columns // group, group)
        half = 1 << bits - 1
        scale = (grouped.abs().amax(-1, keepdim=True) / (half - 1)).clamp(min=1e-8).to(weight.dtype)
        codes = (grouped / scale.float()).round().clamp(-half, half - 1).reshape(out, columns)
        self.tensors |= {
            f"{module}.weight_packed": _words((codes + half).to(torch.int64), bits),
            f"{module}.weight_scale": scale[..., 0].contiguous(),
            f"{module}.weight_shape": torch.tensor([out, columns]),
        }
        if asymmetric:
            zeros = torch.full((columns // group, out), half)
            self.tensors[f"{module}.weight_zero_point"] = _words(zeros, bits).T.contiguous()

    def group(self, number: int = 0) -> dict[str, Any]:
        """One of compressed-tensors' groups."""
        return self.quantization["config_groups"][f"group_{number}"]

    def write(self, directory: Path, source: Path) -> Path:
        """Everything to a new directory, with the other files of the source."""
        directory.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix != ".safetensors" and not file.name.endswith("index.json"):
                shutil.copy(file, directory)
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()},
            directory / "model.safetensors",
            {"format": "pt"},
        )
        (directory / "config.json").write_text(json.dumps(self.config, indent=2))
        for name, content in self.files.items():
            if content is None:
                (directory / name).unlink()
            elif isinstance(content, bytes):
                (directory / name).write_bytes(content)
            else:
                (directory / name).write_text(json.dumps(content))
        return directory


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of rows packed into int32, the first in the lowest bits."""
    per = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per))
    shifts = torch.arange(0, 32, bits)
    words = (padded.reshape(*padded.shape[:-1], -1, per) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def opened(directory: Path) -> Edit:
    """A checkpoint to be changed."""
    return Edit(load(directory), json.loads((directory / "config.json").read_text()))


def names_in(file: Path) -> Iterable[str]:
    with safe_open(file, "pt") as shard:
        return list(shard.keys())


PLAIN_CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head"],
}
