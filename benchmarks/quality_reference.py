"""Quantizes a checkpoint with llm-compressor: what AWQ and GPTQ reach that run the model.

    python benchmarks/quality_reference.py SOURCE OUTPUT --method gptq --group-size 128

Needs an environment of its own with `llmcompressor` and torch. SOURCE is what gguf2st makes of a GGUF with
`--to f32`; OUTPUT is a compressed-tensors checkpoint, which `quality.py --reference` measures. int4 with
zero points, calibrated on the text of `quality_text.calibrated_on`; everything else as the library has it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from quality_text import calibrated_on

METHODS = ("rtn", "awq", "gptq")


def recipe(method: str, group_size: int, exponents: int) -> list[Any]:
    """The library's modifiers, with its own defaults for all but the layout of the weights.

    AWQ tries that many exponents for the scale of an activation (the library's default is 20).
    """
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": group_size,
    }
    layout: dict[str, Any] = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    if method == "gptq":
        return [GPTQModifier(**layout)]
    plain = QuantizationModifier(**layout)
    return [AWQModifier(n_grid=exponents), plain] if method == "awq" else [plain]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--exponents", type=int, default=20, help="that AWQ tries")
    arguments = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.source)
    ids = calibrated_on(tokenizer)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids.tolist()]
    if not torch.accelerator.is_available():
        # AWQ pins memory for copies to a GPU, which fails where there is none.
        IntermediatesCache.pin_memory = lambda *_, **__: None
    started = time.monotonic()
    oneshot(
        model=model,
        dataset=datasets.Dataset.from_list(rows),
        recipe=recipe(arguments.method, arguments.group_size, arguments.exponents),
        max_seq_length=ids.shape[1],
        num_calibration_samples=len(rows),
        # Rows come in their order, so that a run can be repeated.
        shuffle_calibration_samples=False,
    )
    print(f"{time.monotonic() - started:.0f} s")
    model.save_pretrained(arguments.output, save_compressed=True)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
