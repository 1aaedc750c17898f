"""The text that models are measured on, and the text that what needs activations is calibrated on.

Both are cut from files that every Python 3.11 has, and from `quality.txt`; they don't overlap.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch

# Prose, code and documentation to measure on: rows of LENGTH tokens, one each STRIDE tokens.
ROWS, LENGTH, STRIDE = 3, 256, 512
CALIBRATION_ROWS, CALIBRATION_LENGTH = 6, 384


def measured_on(tokenizer: Any) -> torch.Tensor:
    """Token ids to measure on, int64 (ROWS, LENGTH)."""
    text = Path(__file__).with_name("quality.txt").read_text("utf-8")
    ids = _ids(tokenizer, text + _topics()[100_000:108_000])
    return torch.stack([ids[n * STRIDE : n * STRIDE + LENGTH] for n in range(ROWS)])


def calibrated_on(tokenizer: Any) -> torch.Tensor:
    """Token ids of other text, int64 (CALIBRATION_ROWS, CALIBRATION_LENGTH)."""
    ids = _ids(tokenizer, _topics()[250_000:290_000])
    return ids[: CALIBRATION_ROWS * CALIBRATION_LENGTH].reshape(CALIBRATION_ROWS, -1)


def _topics() -> str:
    topics = pydoc_data.topics.topics
    return "\n".join(topics[key] for key in sorted(topics))


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    return ids
