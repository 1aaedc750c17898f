"""Recovering rotary scaling from what llama.cpp keeps of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

# Largest relative difference between the stored factors and those that the recovered
# parameters give: the file holds them in float32, computed from float32 frequencies.
FACTOR_TOLERANCE = 1e-4


def llama3_factors(
    dimension: int, base: float, factor: float, low: float, high: float, original: float
) -> npt.NDArray[np.float64]:
    """Divisors of the rotary frequencies under Llama 3 scaling, float64 of shape (dimension / 2,).

    Source: `_compute_llama3_parameters` in transformers' `modeling_rope_utils.py`.
    """
    wavelength = 2 * math.pi * base ** (np.arange(0, dimension, 2) / dimension)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / factor + smooth)


def recover_llama3(
    factors: npt.NDArray[Any], dimension: int, base: float, original_hint: int | None
) -> dict[str, Any] | None:
    """Llama 3 rope parameters that give the stored `factors`; None when all factors are 1.

    The converter's table (`LlamaModel.generate_extra_tensors`) depends on the
    low and high frequency factors and the original context length only through
    a straight line, so the low one is taken as 1, its value in every release.
    Raises ValueError when no parameters give the table.
    """
    stored = np.asarray(factors, np.float64).ravel()
    if len(stored) != dimension // 2:
        raise ValueError(f"{len(stored)} rotary factors don't fit heads of {dimension}")
    factor = float(stored.max())
    if np.allclose(stored, 1.0, rtol=FACTOR_TOLERANCE):
        return None
    low, candidates = 1.0, []
    inverse_wavelength = base ** (-np.arange(0, dimension, 2) / dimension) / (2 * math.pi)
    smooth = (1 / stored - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    if between.sum() >= 2:
        slope, intercept = np.polyfit(inverse_wavelength[between], smooth[between], 1)
        high = low - low / intercept
        candidates.append((round(float(high), 2), round(float(slope * (high - low)))))
    # Too few heads' dimensions lie between: try the values of all releases.
    originals = [original_hint] if original_hint else []
    candidates += [(4.0, original) for original in (*originals, 8192)]
    if between.sum() == 1:
        at = int(np.flatnonzero(between)[0])
        candidates.append((4.0, round((low + 3 * smooth[at]) / inverse_wavelength[at])))
    for high, original in candidates:
        if high <= low or original <= 0:
            continue
        computed = llama3_factors(dimension, base, factor, low, high, original)
        if np.allclose(computed, stored, rtol=FACTOR_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": round(factor, 4),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ValueError(
        "rope_freqs.weight fits no Llama 3 scaling; give the original with --config-from"
    )


def standard_scaling(key: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Rope parameters of the keys `rope.scaling.*` (none, linear or yarn).

    `key(name, default)` looks up a key of the architecture. Source:
    `TextModel.set_gguf_parameters` in llama.cpp's `conversion/base.py`.
    """
    kind = key("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope scaling of type {kind!r} isn't supported for this architecture")
    parameters: dict[str, Any] = {"rope_type": kind, "factor": key("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        names = {
            "rope.scaling.original_context_length": "original_max_position_embeddings",
            "rope.scaling.attn_factor": "attention_factor",
            "rope.scaling.yarn_ext_factor": "extrapolation_factor",
            "rope.scaling.yarn_attn_factor": "attention_factor",
            "rope.scaling.yarn_beta_fast": "beta_fast",
            "rope.scaling.yarn_beta_slow": "beta_slow",
        }
        for stored, field in names.items():
            if (value := key(stored, None)) is not None:
                parameters[field] = value
    return parameters
