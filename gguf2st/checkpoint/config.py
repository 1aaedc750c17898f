"""config.json and the processors' files, from keys, shapes and constants of the architecture."""

from __future__ import annotations

from typing import Any

from gguf2st.errors import InputError
from gguf2st.mapping.environment import Environment
from gguf2st.mapping.expression import ExpressionError
from gguf2st.mapping.resolve import Resolution
from gguf2st.mapping.table import Fields


def build_config(resolution: Resolution, torch_dtype: str) -> dict[str, Any]:
    """The content of config.json.

    Text models are flat; multimodal ones have `text_config` and `vision_config`.
    Raises `InputError` naming the key or field that can't be derived.
    """
    table, text = resolution.table, resolution.text
    names = {key: t.fill(text) for key, t in table.classes[resolution.variant].items()}
    fields = evaluate_fields(table.config, text, resolution)
    head = {
        "architectures": [names["class"]],
        "model_type": names["model_type"],
        "dtype": torch_dtype,
    }
    if resolution.vision_table is None or resolution.vision is None:
        return head | fields
    vision_table, vision = resolution.vision_table, resolution.vision
    return (
        head
        | evaluate_fields(table.multimodal, text, resolution)
        | evaluate_fields(vision_table.multimodal, vision, resolution)
        | {"tie_word_embeddings": fields["tie_word_embeddings"]}
        | {
            "text_config": {"model_type": names["text_model_type"], "dtype": torch_dtype} | fields,
            "vision_config": {"model_type": names["vision_model_type"], "dtype": torch_dtype}
            | evaluate_fields(vision_table.config, vision, resolution),
        }
    )


def build_processor_files(resolution: Resolution) -> dict[str, dict[str, Any]]:
    """File name -> content of the files that the model's image processors read; empty for text."""
    if resolution.vision_table is None or resolution.vision is None:
        return {}
    return {
        name: evaluate_fields(fields, resolution.vision, resolution)
        for name, fields in resolution.vision_table.files.items()
    }


def evaluate_fields(fields: Fields, names: Environment, resolution: Resolution) -> dict[str, Any]:
    """Values of a table's fields; dotted names become nested objects, None leaves a field out."""
    result: dict[str, Any] = {}
    for name, expression in fields.derived.items():
        try:
            value = expression.evaluate(names)
        except ExpressionError as error:
            raise InputError(
                f"{resolution.model.language.path}: config field {name} can't be derived ({error}); "
                "give the original file with --config-from."
            ) from error
        if value is not None:
            _put(result, name, value)
    for name, value in fields.constants.items():
        _put(result, name, value)
    return result


def _put(target: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[leaf] = value
