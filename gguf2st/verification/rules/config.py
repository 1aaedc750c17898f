"""Rules about config.json: where the quantization_config is, its schema, fields of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gguf2st.verification.context import Context
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy, rule
from gguf2st.verification.rules.disagreements import findings

_TOP = "config.json: quantization_config"


@rule("D-29", "one quantization_config, at the top")
def placement(context: Context) -> Iterator[Finding]:
    """quantization_config is a key of config.json itself, and says the same as any other place.

    Source: vLLM's config/model.py, transformers_utils/config.py and model_loader/weight_utils.py,
    SGLang's configs/model_config.py and model_loader/weight_utils.py (`get_quant_config`),
    transformers' modeling_utils.py (vllm#11122).
    """
    view = context.view
    places = dict(view.quantization_places)
    codes = bool(context.quantized)
    if _TOP not in places:
        if not places and not codes:
            return
        where = next(iter(places), "")
        values: dict[str, Any] = {}
        if where.startswith("config.json: "):
            values = {where.removeprefix("config.json: "): None}
        values["quantization_config"] = dict(places[where]) if where else None
        for engine in context.engines:
            if where in _ALSO_READ.get(engine, ()):
                continue
            yield Finding(
                "D-29",
                engine,
                Effect.CRASH if engine == "vllm" else Effect.WRONG,
                (where or "config.json",),
                "the quantization_config is here and not at the top of config.json, so the model is "
                "taken for unquantized"
                if where
                else "tensors hold codes, and there is no quantization_config",
                Remedy("move it to the top of config.json", Mend.CONFIG, values=values)
                if where
                else Remedy("derive it from the tensors", Mend.MATCH),
                "ValueError: There is no module or parameter named ..." if engine == "vllm" else "",
            )
        return
    top = places.pop(_TOP)
    for place, other in places.items():
        if place == _MODELOPT:
            yield from _modelopt(top, other)
            continue
        if place.startswith("config.json") or _differ(top, other):
            nested = place.startswith("config.json: ")
            key = place.removeprefix("config.json: ")
            yield Finding(
                "D-29",
                "",
                Effect.RISK,
                (place,),
                "a second quantization_config"
                + (", which contradicts the first" if _differ(top, other) else ""),
                Remedy(
                    "remove it",
                    Mend.CONFIG if nested else Mend.DROP,
                    values={key: None} if nested else {},
                ),
            )


# vLLM and SGLang look into it where config.json says nothing, or nothing of a mixture's layers.
_MODELOPT = "hf_quant_config.json"


def _modelopt(top: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[Finding]:
    """What ModelOpt's own file says otherwise than config.json; keys differ in their names."""
    inner = document.get("quantization")
    other: Mapping[str, Any] = inner if isinstance(inner, dict) else document
    pairs = {
        "quant_algo": (top.get("quant_algo"), other.get("quant_algo")),
        "group_size": (top.get("group_size"), other.get("group_size")),
        "exclude_modules": (_names(top, "ignore"), _names(other, "exclude_modules")),
    }
    if top.get("quant_method") != "modelopt":
        pairs["quant_method"] = top.get("quant_method"), "modelopt"
    different = [
        key
        for key, (one, two) in pairs.items()
        if None not in (one, two) and _same(one) != _same(two)
    ]
    if different:
        mixed = "quantized_layers" in other and "quantized_layers" not in top
        yield Finding(
            "D-29",
            "",
            Effect.RISK,
            (_MODELOPT,),
            f"contradicts config.json ({', '.join(different)}); vLLM and SGLang go by config.json"
            + (", and by this file for the layers of a mixture" if mixed else ""),
            Remedy("make both say the same", Mend.MISSING)
            if mixed
            else Remedy("remove it", Mend.DROP),
        )


def _names(config: Mapping[str, Any], key: str) -> list[str] | None:
    found = config.get(key, config.get("exclude_modules", config.get("ignore")))
    return sorted(map(str, found)) if isinstance(found, list) else None


def _same(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


# transformers_utils/config.py and weight_utils.py of vLLM, quantizers/auto.py of transformers.
_NESTED = "config.json: text_config.quantization_config"
_ALSO_READ = {
    "sglang": (_MODELOPT,),
    "vllm": (_MODELOPT, "config.json: compression_config", _NESTED),
    "hf": (_NESTED,),
}


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return any(one[key] != other[key] for key in one.keys() & other.keys() if key != "version")


@rule("D-31", "AWQ has zero points")
def awq_zero_points(context: Context) -> Iterator[Finding]:
    """zero_point is true, and each qweight has qzeros.

    Source: vLLM's auto_awq.py, which creates and reads qzeros whatever zero_point says, and has
    no kernel without; SGLang's awq.py.
    """
    view = context.view
    if view.method != "awq":
        return
    if view.quantization.get("zero_point") is not True:
        said = view.quantization.get("zero_point")
        for engine in ("vllm", "sglang"):
            yield Finding(
                "D-31",
                engine,
                # vLLM's config demands the key; SGLang's falls back to slower kernels.
                Effect.CRASH,
                ("quantization_config.zero_point",),
                f"is {said}, and kernels for AWQ have zero points",
                Remedy(
                    "write true; symmetric codes have zero points of 8",
                    Mend.CONFIG,
                    values={"quantization_config.zero_point": True},
                ),
                "ValueError: Cannot find any of ['zero_point'] in the model's quantization config"
                if said is None
                else "",
            )
    bare = tuple(
        name
        for name, matrix in context.quantized.items()
        if "qweight" in matrix.leaves and "qzeros" not in matrix.leaves
    )
    if bare:
        yield Finding(
            "D-31",
            "",
            Effect.WRONG,
            bare,
            "qweight without qzeros: the zero points stay uninitialized",
            Remedy("write qzeros, 8 everywhere for symmetric codes", Mend.DEQUANTIZE, bare),
        )


@rule("D-21", "GPTQ leaves MTP alone", ("vllm",))
def gptq_drafter(context: Context) -> Iterator[Finding]:
    """Beside GPTQ weights an unquantized MTP block needs an entry in `dynamic` that skips it.

    Source: vLLM's models/qwen3_5_mtp.py, auto_gptq.py.
    """
    view = context.view
    dense = tuple(
        name for name, m in context.stored.items() if name.startswith("mtp.") and not m.quantized
    )
    if view.method != "gptq" or not dense:
        return
    dynamic = view.quantization.get("dynamic")
    keys = list(dynamic) if isinstance(dynamic, dict) else []
    if not any(key.startswith("-:") and "mtp" in key for key in keys):
        entry = r"-:.*mtp.*"
        yield Finding(
            "D-21",
            "vllm",
            Effect.RISK,
            dense,
            "unquantized, and no entry of `dynamic` says so: vLLM's drafter looks for codes",
            Remedy(
                f'add "{entry}": {{}} to quantization_config.dynamic',
                Mend.CONFIG,
                values={"quantization_config.dynamic": {**(dynamic or {}), entry: {}}},
            ),
        )


@rule("D-39", "nested fields agree")
def nested_fields(context: Context) -> Iterator[Finding]:
    """text_config.model_type, layer_types and full_attention_interval fit one another.

    Source: vLLM's models/qwen3_5.py, SGLang's configs/qwen3_next.py, transformers'
    configuration_qwen3_5.py.
    """
    view, text = context.view, context.view.text_config
    layers, types = text.get("num_hidden_layers"), text.get("layer_types")
    if view.model_class in _TEXT_TYPES and "text_config" in view.config:
        wanted = _TEXT_TYPES[view.model_class]
        if text.get("model_type") != wanted:
            said = text.get("model_type")
            for engine, message in (
                ("vllm", f"ValueError: Invalid model_type {said}"),
                ("sglang", f"ValueError: Invalid model type: {said}"),
            ):
                yield Finding(
                    "D-39",
                    engine,
                    Effect.CRASH,
                    ("text_config.model_type",),
                    f"is {said!r}, and {view.model_class} needs {wanted!r}",
                    Remedy(
                        f"write {wanted}", Mend.CONFIG, values={"text_config.model_type": wanted}
                    ),
                    message,
                )
    where = "text_config.layer_types" if view.text_config is not view.config else "layer_types"
    if isinstance(types, list) and isinstance(layers, int) and len(types) != layers:
        yield Finding(
            "D-39",
            "",
            Effect.CRASH,
            (where,),
            f"has {len(types)} entries, and num_hidden_layers is {layers}",
            Remedy("give each layer its type", Mend.MISSING),
            "ValueError: num_hidden_layers must be equal to the number of layer types",
        )
    interval = text.get("full_attention_interval")
    if isinstance(types, list) and isinstance(interval, int) and interval > 0:
        derived = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(len(types))
        ]
        if derived != types:
            yield Finding(
                "D-39",
                "sglang",
                Effect.CRASH,
                (where.replace("layer_types", "full_attention_interval"),),
                f"is {interval}, which contradicts layer_types: SGLang reads the interval, the others the "
                "list",
                Remedy("write the interval that the list has", Mend.MISSING),
                "KeyError",
            )
    error = context.field_error
    if error and "isn't there" not in error and "layer_types" not in error:
        yield Finding(
            "D-39",
            "",
            Effect.CRASH,
            ("config.json",),
            f"{error}, which no model of this class has",
            Remedy("give the field the value of the original model", Mend.MISSING),
        )


_TEXT_TYPES = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
# Field -> the class's default, its engine ("": all) and what happens without the field
# (transformers' and SGLang's configuration classes).
_INTERVAL = (
    "full_attention_interval",
    "sglang",
    Effect.CRASH,
    "SGLang has no default and doesn't read layer_types",
    "AttributeError: 'Qwen3_5TextConfig' object has no attribute 'full_attention_interval'",
)
_DEEPSTACK = (
    "vision_config.deepstack_visual_indexes",
    "sglang",
    Effect.WRONG,
    "SGLang's default is [8, 16, 24], which Qwen3.5 doesn't have: [] is meant",
    "",
)


@rule("D-40", "fields whose default is another model's")
def defaults(context: Context) -> Iterator[Finding]:
    """Sizes that a class would take from its defaults, and fields that SGLang needs.

    Source: transformers' configuration_*.py; SGLang's configs/qwen3_5.py, qwen3_next.py.
    """
    view = context.view
    if "isn't there" in context.field_error:
        yield Finding(
            "D-40",
            "",
            Effect.WRONG,
            ("config.json",),
            f"{context.field_error}: engines take the class's default, which is another model's",
            Remedy("add the field as the original model has it", Mend.MISSING),
        )
    for name, engine, effect, reason, message in _required(view.model_class):
        section: Any = view.text_config
        if "." in name:
            section = view.config.get(name.partition(".")[0])
        if isinstance(section, dict) and name.rpartition(".")[2] not in section:
            dotted = name
            if "." not in name and view.text_config is not view.config:
                dotted = f"text_config.{name}"
            yield Finding(
                "D-40",
                engine,
                effect,
                (dotted,),
                f"isn't there: {reason}",
                Remedy(f"add {dotted}", Mend.CONFIG, values={dotted: _value(context, name)}),
                message,
            )


def _required(model_class: str) -> list[tuple[str, str, Effect, str, str]]:
    found = []
    if model_class.startswith("Qwen3_5"):
        found.append(_INTERVAL)
        if model_class.endswith("ForConditionalGeneration"):
            found.append(_DEEPSTACK)
    return found


def _value(context: Context, name: str) -> Any:
    """What the field has to be, as far as the rest of the config tells."""
    if name.endswith("deepstack_visual_indexes"):
        return []
    types = context.view.text_config.get("layer_types")
    if isinstance(types, list) and "full_attention" in types:
        return types.index("full_attention") + 1
    return 4


@rule("D-13", "companions of quantized matrices")
def companions(context: Context) -> Iterator[Finding]:
    """Every quantized matrix has its scales and what else its format asks for, in fitting shapes.

    Source: compressed_tensors/compressors/*/base.py, AutoAWQ's gemm.py, GPTQModel's qlinear;
    the parameters that vLLM's and SGLang's methods create.
    """
    from gguf2st.verification.rules.companions import mistakes  # noqa: PLC0415

    yield from mistakes(context)
    remedy = Remedy("write into the config what the tensors are", Mend.MATCH)
    size = "the size of the tensor must match the size of the loaded weight"
    effect = {
        "vllm": (Effect.CRASH, size),
        "sglang": (Effect.CRASH, size),
        # It decompresses by the shapes that are there.
        "hf": (Effect.RISK, ""),
    }
    yield from findings(context, "D-13", effect, remedy)
