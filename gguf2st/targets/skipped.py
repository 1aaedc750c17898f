"""`modules_to_not_convert`: a list of names that readers match in their own, looser ways."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from gguf2st.errors import UnsupportedError
from gguf2st.targets.names import Candidate, cover, engine_names

# Routers are never quantized by an engine. Their name is the beginning of others
# (`mlp.gate` of `mlp.gate_proj` and of what engines make of it, `mlp.gate_up_proj`), so where
# such are quantized they must stay out of the list, and can.
_ROUTER = ".gate"


def substrings(unquantized: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Entries for AWQ, where one that lies anywhere in a name skips the module.

    vLLM: quantization/utils/quant_utils.py, `is_layer_skipped` in mode "substring";
    SGLang: quantization/awq/awq.py, `is_layer_skipped_awq`, on joined names only;
    transformers: quantizers/quantizers_utils.py, `should_convert_module`.

    Never empty: vLLM would then derive a list from the tensors in `maybe_update_config`,
    which takes every parent of a lone parameter such as `linear_attn.A_log` for unquantized.
    """
    text = "\n".join(engine_names(quantized))
    entries = _entries(unquantized, quantized, lambda entry, _: entry in text)
    return entries or ["lm_head"]


def names(unquantized: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Entries for transformers' native fp8, by the loosest reading of each of its readers.

    vLLM: quantization/fp8.py, exact names; SGLang: quantization/utils.py,
    `is_layer_skipped`, whole components anywhere in a name; transformers:
    quantizers/quantizers_utils.py, `should_convert_module`, beginning or end of a name.
    """
    return _entries(
        unquantized,
        quantized,
        lambda entry, others: any(
            name.startswith(entry) or name.endswith(entry) or f".{entry}." in f".{name}."
            for name in others
        ),
    )


def _entries(
    unquantized: Iterable[str],
    quantized: Iterable[str],
    hits: Callable[[str, Collection[str]], bool],
) -> list[str]:
    alone, against = engine_names(unquantized), engine_names(quantized)
    entries = []
    for name in alone:
        if not hits(name, against):
            entries.append(name)
        elif not name.endswith(_ROUTER):
            raise UnsupportedError(
                f"{name} can't stay unquantized in this format: its name is part of a quantized "
                "module's; quantize both or none."
            )

    # Where checkpoints call the text part `language_model`, transformers puts all parts into `model`.
    beside_language_model = any(name.startswith("language_model.") for name in [*against, *alone])

    def unusable(candidate: Candidate, others: Collection[str]) -> bool:
        return hits(candidate.text, others)

    # Ends of names hit whatever an engine calls what lies above the blocks.
    for candidate in cover(unquantized, quantized, unusable).candidates:
        entries.append(candidate.text)
        # transformers takes an entry for the beginning of a name, not for a part of it.
        prefixed = f"model.{candidate.text}"
        if candidate.inside and (
            any(name.startswith(f"{prefixed}.") for name in alone)
            or (candidate.is_root and beside_language_model)
        ):
            entries.append(prefixed)
    return list(dict.fromkeys(entries))
