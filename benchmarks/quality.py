"""What each recipe loses: real models, converted and compared with the GGUF's own weights.

    python benchmarks/quality.py smollm2 gemma3 --out quality.json

For each recipe the model is converted, the written checkpoint decoded by readers that aren't ours, and
run by transformers in float32 over 768 tokens of prose, code and documentation. Measured against the
GGUF's weights, decoded to float32: KL divergence of the next token's distribution, share of positions
with the same likeliest token, perplexity. Tiny models exaggerate; the order is what carries over.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

import gguf2st
from gguf2st.mapping import resolve
from gguf2st.modules import modules_of
from gguf2st.quantize import read_importance
from tests.engines.dequantized import dequantized
from tests.oracles import real_models

HERE = Path(__file__).parent
IMATRIX = HERE.parent / "fixtures/importance"
# Of Gemma there is no file of llama-imatrix here: the same sums are taken with transformers.
MODELS = {
    "smollm2": (real_models.smollm2, IMATRIX / "smollm2-135m.imatrix.gguf"),
    "gemma3": (real_models.gemma3_270m, None),
}
ROWS, LENGTH, STRIDE = 3, 256, 512
CALIBRATION_ROWS, CALIBRATION_LENGTH = 6, 384


@dataclass(frozen=True)
class Recipe:
    """A way to convert: format, its options, and whether the importance matrix is given."""

    name: str
    to: str = "ct"
    target: dict[str, Any] = field(default_factory=dict)
    imatrix: bool = False
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
        Recipe(f"quality {level}, imatrix", imatrix=True, choices={"quality": level})
        for level in range(4)
    ),
    Recipe("lossless", "lossless"),
)


class Laboratory:
    """One model in memory; recipes change its weights and are compared with the first."""

    def __init__(self, gguf: Path, imatrix: Path | None, directory: Path) -> None:
        self._gguf, self._directory = gguf, directory
        gguf2st.convert(gguf, directory / "reference", to="f32")
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "reference")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory / "reference", dtype=torch.float32
        ).eval()
        topics = "\n".join(
            pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)
        )
        text = (HERE / "quality.txt").read_text("utf-8") + topics[100_000:108_000]
        ids = tokenizer(text, return_tensors="pt").input_ids[0]
        self._ids = torch.stack([ids[n * STRIDE : n * STRIDE + LENGTH] for n in range(ROWS)])
        self._reference = self._log_probabilities()
        others = tokenizer(topics[250_000:290_000], return_tensors="pt").input_ids[0]
        self._importance = read_importance(imatrix) if imatrix else self._measured(others)

    def _measured(self, ids: torch.Tensor) -> dict[str, np.ndarray]:
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
        rows = ids[: CALIBRATION_ROWS * CALIBRATION_LENGTH].reshape(CALIBRATION_ROWS, -1)
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

    def measure(self, recipe: Recipe) -> dict[str, Any]:
        """Convert, load, run."""
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
            importance=self._importance if recipe.imatrix else None,
            **recipe.choices,
        )
        seconds = time.monotonic() - started
        tensors: dict[str, torch.Tensor] = {}
        for shard in output.glob("*.safetensors"):
            tensors |= load_file(shard)
        config = json.loads((output / "config.json").read_text("utf-8"))
        if "quantization_config" in config:
            tensors = dequantized(tensors, config["quantization_config"])
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        divergence = likelihood = agreed = 0.0
        for row, reference, found in zip(
            self._ids, self._reference, self._log_probabilities(), strict=True
        ):
            divergence += float((reference.exp() * (reference - found)).sum())
            agreed += int((reference.argmax(-1) == found.argmax(-1)).sum())
            likelihood -= float(found[:-1].gather(1, row[1:, None]).sum())
        weights = sum(
            m.numel()
            for n, m in tensors.items()
            if n.removesuffix(".weight") in self._names(report)
        )
        packed = sum(path.stat().st_size for path in output.glob("*.safetensors")) - 2 * (
            report.parameters - weights
        )
        return {
            "recipe": recipe.name,
            "kl": divergence / (ROWS * LENGTH),
            "top1": agreed / (ROWS * LENGTH),
            "perplexity": math.exp(likelihood / (ROWS * (LENGTH - 1))),
            "bits_per_quantized_weight": 8 * packed / weights if weights else 16.0,
            "bytes": report.total_bytes,
            "seconds": round(seconds, 1),
        }

    @staticmethod
    def _names(report: gguf2st.ConversionReport) -> set[str]:
        return {module.name for module in report.modules}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--only", default="", help="recipes whose name holds this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.models:
        obtain, imatrix = MODELS[name]
        with tempfile.TemporaryDirectory() as directory:
            laboratory = Laboratory(obtain(), imatrix, Path(directory))
            for recipe in RECIPES:
                if arguments.only not in recipe.name:
                    continue
                try:
                    found = laboratory.measure(recipe)
                except gguf2st.UnsupportedError as error:
                    print(f"{name:8} {recipe.name:38} {error}", flush=True)
                    continue
                results.setdefault(name, []).append(found)
                print(
                    f"{name:8} {recipe.name:38} KL {found['kl']:.4f}  top-1 {found['top1']:.3f}  "
                    f"perplexity {found['perplexity']:.2f}  {found['bits_per_quantized_weight']:.2f} bits  "
                    f"{found['seconds']} s",
                    flush=True,
                )
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
