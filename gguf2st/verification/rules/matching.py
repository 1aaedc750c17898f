"""Rules about exceptions and targets: what the config says against what the tensors are."""

from __future__ import annotations

from collections.abc import Iterator

from gguf2st.engines import ENGINES
from gguf2st.engines.patterns import REGEX
from gguf2st.verification.context import Context
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy, rule
from gguf2st.verification.rules.disagreements import NO_MODULE, disagreements, findings, hit

_SCHEMES = "ValueError: Found different quantization schemes for ... in {whole}"


@rule("D-01", "exceptions aren't quantized")
def excepted_but_quantized(context: Context) -> Iterator[Finding]:
    """A module that the config excepts from quantization must not hold codes.

    Source: vLLM's models/utils.py AutoWeightsLoader raises for tensors without a parameter,
    SGLang's models pass over them, transformers lists them as unexpected and leaves the weight
    as it was initialized.
    """
    effect = {
        "vllm": (Effect.CRASH, NO_MODULE),
        "sglang": (Effect.WRONG, ""),
        "hf": (Effect.WRONG, ""),
    }
    yield from findings(
        context, "D-01", effect, Remedy("take the entries out of the exceptions", Mend.MATCH)
    )


@rule("D-02", "unquantized modules are excepted")
def unquantized_but_targeted(context: Context) -> Iterator[Finding]:
    """A linear layer that isn't quantized must be excepted, else codes are looked for.

    Source: as in D-01; vLLM doesn't look for what stays unfilled when a model is quantized
    (model_loader/default_loader.py track_weights_loading).
    """
    effect = {
        "vllm": (Effect.CRASH, NO_MODULE),
        "sglang": (Effect.WRONG, ""),
        "hf": (Effect.WRONG, ""),
    }
    yield from findings(
        context, "D-02", effect, Remedy("list the modules as exceptions", Mend.MATCH)
    )


@rule("D-04", "fused layers are excepted as a whole", ("vllm", "sglang"))
def partly_excepted(context: Context) -> Iterator[Finding]:
    """All shards of a fused layer are excepted, or none.

    Source: should_ignore_layer in quantization/compressed_tensors/utils.py of both engines,
    vLLM's utils/quant_utils.py is_layer_skipped, SGLang's utils.py is_layer_skipped.
    """
    message = "ValueError: Found different quantization schemes for the shards of {whole}"
    effect = {"vllm": (Effect.CRASH, message), "sglang": (Effect.CRASH, _SCHEMES)}
    yield from findings(
        context, "D-04", effect, Remedy("list all shards and the fused name, or none", Mend.MATCH)
    )


@rule("D-05", "fused names are listed", ("vllm", "sglang"))
def fused_name_missing(context: Context) -> Iterator[Finding]:
    """Where a model class doesn't say what its fused layers consist of, their own name is matched.

    Source: packed_modules_mapping of the model classes; of SGLang's most have none.
    """
    effect = {"vllm": (Effect.CRASH, NO_MODULE), "sglang": (Effect.WRONG, "")}
    yield from findings(
        context,
        "D-05",
        effect,
        Remedy("list the fused name (qkv_proj, gate_up_proj, ...) beside its parts", Mend.MATCH),
    )


@rule("D-06", "fused layers share a scheme", ("vllm", "sglang"))
def several_schemes(context: Context) -> Iterator[Finding]:
    """Matrices that an engine makes one layer of have the same bits, groups and zero points.

    Source: vLLM's and SGLang's quantization/compressed_tensors/utils.py; linear.py's loaders,
    which put all shards into one parameter.
    """
    message = "AssertionError: param_data.shape=..., loaded_weight.shape=..."
    effect = {"vllm": (Effect.CRASH, "AssertionError"), "sglang": (Effect.CRASH, message)}
    yield from findings(
        context, "D-06", effect, Remedy("dequantize the whole layer", Mend.DEQUANTIZE)
    )


@rule("D-07", "quantized modules have a target")
def without_target(context: Context) -> Iterator[Finding]:
    """Some target matches each quantized module; SGLang refuses any layer that none matches.

    Source: find_matched_target in quantization/compressed_tensors/utils.py of both engines;
    compressed_tensors' apply_quantization_config.
    """
    effect = {
        "vllm": (Effect.CRASH, NO_MODULE),
        "sglang": (Effect.CRASH, "ValueError: Unable to find matching target for {whole}"),
        "hf": (Effect.WRONG, ""),
    }
    yield from findings(context, "D-07", effect, Remedy('target ["Linear"]', Mend.MATCH))


@rule("D-08", "groups are matched alike")
def other_group(context: Context) -> Iterator[Finding]:
    """With several groups, each engine's order of matching finds the group of the stored scheme.

    Source: find_matched_target of vLLM (name, parts, class) and SGLang (name, class, parts);
    compressed_tensors' match_targets (name, expression, class).
    """
    mismatch = "the size of the tensor must match the size of the loaded weight"
    effect = {
        "vllm": (Effect.CRASH, mismatch),
        "sglang": (Effect.CRASH, mismatch),
        "hf": (Effect.WRONG, ""),
    }
    yield from findings(
        context,
        "D-08",
        effect,
        Remedy("let the group's expressions name the fused layer, too", Mend.MATCH),
    )


@rule("D-19", "what no engine quantizes")
def never_quantized(context: Context) -> Iterator[Finding]:
    """Routers, gates of shared experts, embeddings, convolutions, SGLang's vision towers.

    Source: the model classes: those layers are built with quant_config=None.
    """
    effect = {
        "vllm": (Effect.CRASH, NO_MODULE),
        "sglang": (Effect.WRONG, ""),
        "hf": (Effect.WRONG, ""),
    }
    remedy = Remedy("dequantize the modules and list them as exceptions", Mend.DEQUANTIZE)
    yield from findings(context, "D-19", effect, remedy)
    for engine in context.engines:
        known = context.expected.columns if context.expected else {}
        modules = tuple(
            matrix.name
            for matrix in context.unknown_modules(engine)
            if matrix.quantized and (matrix.name in known or _embedding(matrix.name))
        )
        if modules and context.known(engine):
            drafter = all(name.startswith("mtp.") for name in modules)
            how = Effect.RISK if drafter else effect[engine][0]
            loud = how is Effect.CRASH
            title = context.engines[engine].title
            yield Finding(
                "D-19",
                engine,
                how,
                modules,
                f"quantized, but {title} has no linear layer of that name",
                Remedy(remedy.text, remedy.mend, modules),
                "ValueError: There is no module or parameter named ..." if loud else "",
            )


def _embedding(name: str) -> bool:
    return name.rpartition(".")[2] in ("embed_tokens", "conv1d", "pos_embed")


@rule("D-32", "AWQ names its exceptions", ("vllm",))
def awq_without_list(context: Context) -> Iterator[Finding]:
    """Without modules_to_not_convert vLLM takes the parent of every unquantized tensor for one.

    Source: vLLM's quantization/auto_awq.py maybe_update_config.
    """
    yield from findings(
        context,
        "D-32",
        {"vllm": (Effect.CRASH, NO_MODULE)},
        Remedy('write a list that isn\'t empty, such as ["lm_head"]', Mend.MATCH),
    )


@rule("D-33", "AWQ's exceptions are parts of no other name")
def awq_substring(context: Context) -> Iterator[Finding]:
    """vLLM and SGLang take an AWQ exception for a part of names; transformers for their beginning.

    Source: vLLM's quantization/utils/quant_utils.py is_layer_skipped, SGLang's awq/awq.py
    is_layer_skipped_awq, transformers' quantizers/quantizers_utils.py should_convert_module.
    """
    effect = {
        "vllm": (Effect.CRASH, NO_MODULE),
        "sglang": (Effect.WRONG, ""),
        "hf": (Effect.WRONG, ""),
    }
    yield from findings(
        context, "D-33", effect, Remedy("write the modules' whole names instead", Mend.MATCH)
    )


@rule("D-35", "a quantized output head is named", ("vllm", "sglang"))
def output_head(context: Context) -> Iterator[Finding]:
    """The head's class isn't "Linear": a target must name it, as "re:.*lm_head$".

    Source: vLLM's compressed_tensors.py get_quant_method for ParallelLMHead, SGLang's
    get_lm_head_scheme; both engines' AWQ and GPTQ read "lm_head": true.
    """
    effect = {"vllm": (Effect.CRASH, NO_MODULE), "sglang": (Effect.WRONG, "")}
    remedy = Remedy('add the target "re:.*lm_head$", or dequantize the head', Mend.DEQUANTIZE)
    yield from findings(context, "D-35", effect, remedy)


@rule("D-03", "exceptions hit something")
def dead_entries(context: Context) -> Iterator[Finding]:
    """An exception is the name of a module, not of its parent and not with another prefix.

    Source: the matching functions of D-01 to D-05. Entries for what the checkpoint doesn't
    hold at all are harmless and passed over.
    """
    names = _all_names(context)
    if not names or context.view.method not in ("compressed-tensors", "awq", "fp8"):
        return
    tails: dict[str, str] = {}
    parents: dict[str, str] = {}
    for name in context.stored:
        parts = name.split(".")
        for depth in range(2, len(parts)):
            tails.setdefault(".".join(parts[-depth:]), name)
            parents.setdefault(".".join(parts[: -depth + 1]), name)
    substring = context.view.method == "awq"
    elsewhere: dict[str, str] = {}
    above: dict[str, str] = {}
    for entry in context.entries:
        if (
            entry.startswith(REGEX)
            or "*" in entry
            or any(entry in name if substring else hit(entry, name) for name in names)
        ):
            continue
        twin = _twin(entry, tails)
        if twin:
            elsewhere[entry] = twin
        elif parent := _twin(entry, {**{p: p for p in parents}, **_ends(parents)}):
            above[entry] = parent
    if elsewhere:
        first, right = next(iter(elsewhere.items()))
        yield Finding(
            "D-03",
            "",
            Effect.RISK,
            tuple(elsewhere),
            f"hits no module: with the right prefix the first would be {right}",
            Remedy(
                "leave the entries out, as the modules are quantized"
                if all(twin in context.quantized for twin in elsewhere.values())
                else f"write {right}, and so on",
                Mend.MATCH,
                names=elsewhere,
            ),
        )
    if above:
        first, right = next(iter(above.items()))
        yield Finding(
            "D-03",
            "",
            Effect.RISK,
            tuple(above),
            "hits no module: it names the parent of modules, which no engine takes for its children",
            Remedy(f"write an expression such as re:.*{first.rpartition('.')[2]}.*", Mend.MATCH),
        )


def _twin(entry: str, tails: dict[str, str]) -> str:
    """A name that ends like the entry, in at least two components, with the block's number."""
    parts = entry.split(".")
    for depth in range(min(len(parts), 6), 1, -1):
        tail = ".".join(parts[-depth:])
        numbered = any(part.isdigit() for part in parts[-depth:])
        if tail in tails and (numbered or not any(part.isdigit() for part in parts)):
            return tails[tail]
    return ""


def _ends(parents: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for parent in parents:
        parts = parent.split(".")
        for depth in range(2, len(parts)):
            found.setdefault(".".join(parts[-depth:]), parent)
    return found


def _all_names(context: Context) -> set[str]:
    """All that any engine calls the modules, and all that the checkpoint does."""
    found: set[str] = set()
    for engine in ENGINES:
        modules = context.placed(engine).values()
        for module in {id(m): m for m in modules if m is not None}.values():
            found.update((module.name, *module.probes))
    if found:
        found.update(context.stored)
        found.update(name.rpartition(".")[0] for name in context.view.tensors)
        found.update(_joined(context))
    return found


# What some engine loads as one matrix, and what exporters therefore list, too.
_FUSED = {
    "q_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "w1": "w13",
    "q": "qkv",
}


def _joined(context: Context) -> Iterator[str]:
    for name in context.stored:
        parent, _, leaf = name.rpartition(".")
        if leaf in _FUSED:
            yield f"{parent}.{_FUSED[leaf]}"


@rule("D-34", "expressions compile, and hit vLLM's names")
def expressions(context: Context) -> Iterator[Finding]:
    """Expressions are matched from the start of an engine's own names, which vLLM changes.

    Source: vLLM's CompressedTensorsConfig.apply_vllm_mapper renames plain entries alone, so an
    expression for "model.language_model..." never meets "language_model.model...".
    """
    for entry, reason in context.bad_expressions.items():
        yield Finding(
            "D-34",
            "",
            Effect.CRASH,
            (entry,),
            f"isn't a regular expression: {reason}",
            Remedy("mend the expression", Mend.MATCH),
            f"re.error: {reason}",
        )
    if "vllm" not in context.engines:
        return
    missed: dict[str, str] = {}
    for found in disagreements(context, "vllm"):
        if found.rule in ("D-02", "D-05"):
            for entry in context.entries:
                shards = found.reading.module.shards
                if entry.startswith(REGEX) and all(hit(entry, shard) for shard in shards):
                    missed[entry] = found.reading.module.name
    if missed:
        entry, name = next(iter(missed.items()))
        yield Finding(
            "D-34",
            "vllm",
            Effect.CRASH,
            tuple(missed),
            f"is matched with vLLM's names, such as {name}, which it doesn't hit",
            Remedy(f"begin it with .*, as re:.*{entry.rpartition('.')[2]}", Mend.MATCH),
            "ValueError: There is no module or parameter named ...",
        )
