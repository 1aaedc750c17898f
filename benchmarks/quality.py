"""What each recipe loses: real models, converted and compared with the GGUF's own weights.

    python -m benchmarks.quality smollm2 gemma3 --out benchmarks/quality.json
    python -m benchmarks.quality smollm2 --reference "GPTQ g32"=DIRECTORY --out benchmarks/quality.json

For each recipe the model is converted, the written checkpoint decoded by readers that aren't ours, and
run by transformers in float32 over 768 tokens of prose, code and documentation. Measured against the
GGUF's weights, decoded to float32: KL divergence of the next token's distribution, share of positions
with the same likeliest token, perplexity. Tiny models exaggerate; the order is what carries over.

The second form measures a checkpoint that something else made, such as quality_reference.py. Results are
added to those in the file.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

import gguf2st
from benchmarks.quality_text import LENGTH, ROWS, calibrated_on, measured_on
from gguf2st.mapping import resolve
from gguf2st.modules import modules_of
from gguf2st.quantize import read_importance
from tests.engines.dequantized import EXPERT, SCALES, dequantized, with_merged_experts
from tests.oracles import real_models
from tests.targets import decoders

IMATRIX = Path(__file__).parent.parent / "fixtures/importance"
# Gemma's importance matrix was made of the text that references are calibrated on.
MODELS = {
    "smollm2": (real_models.smollm2, IMATRIX / "smollm2-135m.imatrix.gguf", False),
    "gemma3": (real_models.gemma3_270m, IMATRIX / "gemma3-270m.imatrix.gguf", True),
}


@dataclass(frozen=True)
class Recipe:
    """A way to convert: format, its options, and whether the importance matrix is given.

    With `measured` the matrix is taken here and not from a file, from the text that references are
    calibrated on.
    """

    name: str
    to: str = "ct"
    target: dict[str, Any] = field(default_factory=dict)
    imatrix: bool = False
    measured: bool = False
    choices: dict[str, Any] = field(default_factory=dict)


def _grid(group: int, symmetric: bool = False, bits: int = 4) -> dict[str, Any]:
    # 128 is left to the format: SmolLM2's 576 columns take groups of 64, Gemma's 640 those of 128.
    return {"group_size": None if group == 128 else group, "symmetric": symmetric, "bits": bits}


RTN = {"fit": "rtn"}
SEARCH_ONLY = {"smoothing": 0.0}
RECIPES = (
    Recipe("bf16", "bf16"),
    Recipe("int8 g32", target=_grid(32, True, 8)),
    Recipe("int8 g128", target=_grid(128, True, 8)),
    Recipe("fp8 channel", "fp8"),
    Recipe("mxfp4", "mxfp4"),
    Recipe("nvfp4", "nvfp4"),
    Recipe("int4 sym g128, rtn", target=_grid(128, True), choices=RTN),
    Recipe("int4 asym g128, rtn", target=_grid(128), choices=RTN),
    Recipe("int4 asym g128", target=_grid(128)),
    Recipe("int4 sym g32", target=_grid(32, True)),
    Recipe("int4 asym g32", target=_grid(32)),
    Recipe(
        "int4 asym g128, imatrix, no folding", target=_grid(128), imatrix=True, choices=SEARCH_ONLY
    ),
    Recipe(
        "int4 asym g32, imatrix, no folding", target=_grid(32), imatrix=True, choices=SEARCH_ONLY
    ),
    Recipe("int4 sym g128, imatrix", target=_grid(128, True), imatrix=True),
    Recipe("int4 asym g128, imatrix", target=_grid(128), imatrix=True),
    Recipe("int4 sym g32, imatrix", target=_grid(32, True), imatrix=True),
    Recipe("int4 asym g32, imatrix", target=_grid(32), imatrix=True),
    *(
        Recipe(
            f"int4 asym g{size}, imatrix of other text",
            target=_grid(size),
            imatrix=True,
            measured=True,
        )
        for size in (128, 32)
    ),
    *(
        Recipe(f"quality {level}, imatrix", imatrix=True, choices={"quality": level})
        for level in range(4)
    ),
    Recipe("lossless", "lossless"),
)


class Laboratory:
    """One model in memory; recipes change its weights and are compared with the first."""

    def __init__(self, gguf: Path, imatrix: Path, directory: Path) -> None:
        self._gguf, self._directory = gguf, directory
        gguf2st.convert(gguf, directory / "reference", to="f32")
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "reference")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory / "reference", dtype=torch.float32
        ).eval()
        self._ids = measured_on(tokenizer)
        self._reference = self._log_probabilities()
        self._calibration = calibrated_on(tokenizer)
        self._importance = read_importance(imatrix)
        # Before any recipe puts other weights into the model.
        self._measured_here = self._measured()

    def _measured(self) -> dict[str, np.ndarray]:
        """The mean square of what each matrix is multiplied with, by GGUF tensor, as llama-imatrix takes it."""
        sums: dict[str, torch.Tensor] = {}

        def hook(name: str) -> Any:
            def add(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
                values = inputs[0].reshape(-1, inputs[0].shape[-1])
                sums[name] = sums.get(name, torch.zeros(values.shape[-1])) + values.square().sum(0)

            return add

        hooks = [
            module.register_forward_pre_hook(hook(name))
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.Linear)
        ]
        rows = self._calibration
        with torch.no_grad():
            for row in rows:
                self._model(row[None])
        for handle in hooks:
            handle.remove()
        return {
            module.source().tensor.name: (sums[module.name] / rows.numel()).numpy()
            for recipe in resolve(gguf2st.open_model(self._gguf)).recipes
            for module in modules_of(recipe)
            if module.name in sums
        }

    def _log_probabilities(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self._model(row[None]).logits[0].log_softmax(-1) for row in self._ids]

    def convert(self, recipe: Recipe) -> dict[str, Any]:
        """Convert and measure."""
        importance = self._measured_here if recipe.measured else self._importance
        output = self._directory / "output"
        started = time.monotonic()
        report = gguf2st.convert(
            self._gguf,
            output,
            force=True,
            to=recipe.to,
            # SGLang's kernels leave out matrices of SmolLM2's odd shape, which would flatter it.
            engines=("vllm", "hf") if recipe.to not in ("bf16", "f32") else None,
            target=gguf2st.TargetOptions(**recipe.target),
            importance=importance if recipe.imatrix else None,
            **recipe.choices,
        )
        seconds = time.monotonic() - started
        found = self.measure(recipe.name, output)
        return found | {"bytes": report.total_bytes, "seconds": round(seconds, 1)}

    def measure(self, name: str, checkpoint: Path) -> dict[str, Any]:
        """Load and run."""
        tensors: dict[str, torch.Tensor] = {}
        for shard in checkpoint.glob("*.safetensors"):
            tensors |= load_file(shard)
        bits = bits_per_quantized_weight(tensors)
        config = json.loads((checkpoint / "config.json").read_text("utf-8"))
        if "quantization_config" in config:
            tensors = dequantized(tensors, config["quantization_config"])
        if any(map(EXPERT.fullmatch, tensors)):
            tensors = with_merged_experts(tensors)
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        divergence = likelihood = agreed = 0.0
        for row, reference, found in zip(
            self._ids, self._reference, self._log_probabilities(), strict=True
        ):
            divergence += float((reference.exp() * (reference - found)).sum())
            agreed += int((reference.argmax(-1) == found.argmax(-1)).sum())
            likelihood -= float(found[:-1].gather(1, row[1:, None]).sum())
        return {
            "recipe": name,
            "kl": divergence / (ROWS * LENGTH),
            "top1": agreed / (ROWS * LENGTH),
            "perplexity": math.exp(likelihood / (ROWS * (LENGTH - 1))),
            "bits_per_quantized_weight": bits,
        }


def bits_per_quantized_weight(tensors: dict[str, torch.Tensor]) -> float:
    """Bits of codes, scales and zero points for each quantized weight; 16 where none is quantized.

    Scales count 16 bits at most: references calibrated in float32 store theirs so, too.
    """
    bits = weights = 0
    for name in (match[1] for match in map(SCALES.fullmatch, tensors) if match):
        parts = decoders.module_tensors(tensors, name)
        for leaf, tensor in parts.items():
            width = 8 * tensor.element_size()
            bits += tensor.numel() * (min(width, 16) if "scale" in leaf else width)
        codes = parts.get("weight_packed", parts.get("weight"))
        assert codes is not None, f"{name} is in a format whose codes aren't counted here"
        shape = parts.get("weight_shape")
        weights += (
            math.prod(shape.tolist())
            if shape is not None
            else codes.numel() * (2 if codes.dtype == torch.uint8 else 1)
        )
    return bits / weights if weights else 16.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--only", default="", help="recipes whose name holds this")
    parser.add_argument(
        "--reference", action="append", default=[], help="NAME=DIRECTORY, instead of recipes"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text("utf-8"))
    references = dict(text.rsplit("=", 1) for text in arguments.reference)
    for name in arguments.models:
        obtain, imatrix, of_calibration = MODELS[name]
        with tempfile.TemporaryDirectory() as directory:
            laboratory = Laboratory(obtain(), imatrix, Path(directory))
            todo: dict[str, Callable[[], dict[str, Any]]] = {
                title: partial(laboratory.measure, title, Path(path))
                for title, path in references.items()
            }
            if not references:
                todo = {
                    recipe.name: partial(laboratory.convert, recipe)
                    for recipe in RECIPES
                    if arguments.only in recipe.name and not (recipe.measured and of_calibration)
                }
            for title, measure in todo.items():
                try:
                    found = measure()
                except gguf2st.UnsupportedError as error:
                    print(f"{name:8} {title:38} {error}", flush=True)
                    continue
                kept = [entry for entry in results.get(name, []) if entry["recipe"] != title]
                results[name] = [*kept, found]
                print(
                    f"{name:8} {title:38} KL {found['kl']:.4f}  top-1 {found['top1']:.3f}  "
                    f"perplexity {found['perplexity']:.2f}  "
                    f"{found['bits_per_quantized_weight']:.2f} bits",
                    flush=True,
                )
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
