"""Rules about tensors: what the model class has against what lies there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import ge

from gguf2st.verification.context import Context
from gguf2st.verification.expected import Experts, Part
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy, rule
from gguf2st.verification.stored import COMPANIONS, Layout

_NOT_THERE = Remedy("the weights aren't there: take them from the original", Mend.MISSING)
UNINITIALIZED = "ValueError: Following weights were not initialized from checkpoint"
# What other programs leave in checkpoints, and every loader passes over.
_HARMLESS = (
    "rotary_emb.inv_freq",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    "masked_bias",
    ".attn.bias",
)


@rule("D-27", "names have the class's prefix", needs=("tensors",))
def name_prefix(context: Context) -> Iterator[Finding]:
    """Names begin as the model class has them: "model.", or "model.language_model.".

    Source: the classes' module trees; vLLM's hf_to_vllm_mapper, SGLang's load_weights and
    transformers' conversion_mapping.py for what each accepts beside.
    """
    expected = context.expected
    if expected is None or context.prefix == expected.prefix:
        return
    names = {name: context.canonical(name) for name in context.view.tensors}
    wrong = {old: new for old, new in names.items() if old != new}
    for engine in context.engines:
        accepted = _ACCEPTED.get((engine, expected.prefix), frozenset())
        if context.prefix in accepted:
            continue
        yield Finding(
            "D-27",
            engine,
            Effect.CRASH if engine == "vllm" else Effect.WRONG,
            tuple(wrong),
            f"{context.view.model_class} has names that begin with {expected.prefix!r}, and these "
            f"begin with {context.prefix!r}",
            Remedy(
                f"rename {context.prefix}* to {expected.prefix}*, or name another class in architectures",
                Mend.RENAME,
                names=wrong,
            ),
            "ValueError: There is no module or parameter named ..." if engine == "vllm" else "",
        )


# Engine and right prefix -> prefixes that it translates by itself.
_ACCEPTED: dict[tuple[str, str], frozenset[str]] = {
    ("vllm", "model."): frozenset(),
    ("sglang", "model.language_model."): frozenset({"model."}),
    ("vllm", "language_model.model."): frozenset({"model.language_model."}),
    ("hf", "language_model.model."): frozenset({"model.language_model."}),
}


def _present(context: Context) -> set[str]:
    """Parameters that are there, quantized or not, by canonical names."""
    if "present" not in context.answers:
        context.answers["present"] = _find_present(context)
    found: set[str] = context.answers["present"]
    return found


def _find_present(context: Context) -> set[str]:
    found = set(context.canonical_tensors)
    for name, matrix in context.canonical_stored.items():
        if matrix.quantized:
            found.add(f"{name}.weight")
            found.add(name)
    return found


def _stacked(block: Experts, present: set[str]) -> bool:
    return not block.each or any(name in present for name, _ in block.stacked)


def _wanted(context: Context) -> Iterator[tuple[str, tuple[int, ...], Part, bool]]:
    """Name, shape, part and whether it may be missing, of all parameters in the form that is there."""
    expected = context.expected
    if expected is None:
        return
    present = _present(context)
    for parameter in expected.parameters.values():
        yield parameter.name, parameter.shape, parameter.part, parameter.optional
    for block in expected.experts:
        if _stacked(block, present):
            for name, shape in block.stacked:
                yield name, shape, block.part, False
        else:
            for name, pair in block.single():
                yield f"{name}.weight", pair, block.part, False


@rule("D-24", "all parameters are there", needs=("tensors",))
def missing(context: Context) -> Iterator[Finding]:
    """Every parameter of the model class is there; engines don't check that themselves.

    Source: vLLM's default_loader.py track_weights_loading looks at unquantized models alone,
    and of those at norms and the like; SGLang looks at none; transformers warns and initializes
    at random.
    """
    present = _present(context)
    absent = tuple(
        name
        for name, _, part, optional in _wanted(context)
        if not optional and part is not Part.MTP and name not in present
    )
    # The output head has a rule of its own.
    absent = tuple(name for name in absent if not name.endswith("lm_head.weight"))
    if not absent:
        return
    # Layers that could be quantized have their own loaders, and vLLM doesn't look at those.
    known = context.expected.parameters if context.expected else {}
    looked_at = [
        name
        for name in absent
        if name in known
        and not known[name].linear
        and not name.endswith(("bias", "embed_tokens.weight"))
    ]
    for engine in context.engines:
        loud = engine == "vllm" and not context.view.method and bool(looked_at)
        message = UNINITIALIZED if loud else ""
        if engine == "hf" and any(".experts." in name for name in absent):
            loud, message = (
                True,
                "RuntimeError: We encountered some issues during automatic conversion",
            )
        yield Finding(
            "D-24",
            engine,
            Effect.CRASH if loud else Effect.WRONG,
            absent,
            "missing, and what the engine computes instead is arbitrary",
            _NOT_THERE,
            message,
        )


@rule("D-23", "no tensor is left over", needs=("tensors",))
def unexpected(context: Context) -> Iterator[Finding]:
    """Each tensor belongs to a parameter of the model class.

    Source: vLLM's models/utils.py AutoWeightsLoader raises; SGLang logs, transformers warns.
    """
    if context.expected is None:
        return
    wanted = {name for name, *_ in _wanted(context)}
    modules = {name.removesuffix(".weight") for name in wanted}
    extra = []
    for name, tensor in context.canonical_tensors.items():
        module, _, leaf = name.rpartition(".")
        if name in wanted or name.startswith("mtp.") or name.endswith(_HARMLESS):
            continue
        if leaf in COMPANIONS and module in modules:
            continue
        if name.endswith(("_blocks", "_scales")) and name.rpartition("_")[0] in modules:
            continue
        extra.append(tensor.name)
    if not extra:
        return
    for engine in context.engines:
        loud = engine == "vllm"
        yield Finding(
            "D-23",
            engine,
            Effect.CRASH if loud else Effect.RISK,
            tuple(extra),
            f"{context.view.model_class} has no such parameters",
            Remedy("leave the tensors out", Mend.DROP),
            "ValueError: There is no module or parameter named ..." if loud else "",
        )


_FEED_FORWARD = tuple(f".{name}_proj.weight" for name in ("gate", "up", "down"))


@rule("D-25", "shapes follow from the config", needs=("tensors",))
def shapes(context: Context) -> Iterator[Finding]:
    """Each tensor has the shape that the config's sizes give it.

    Source: the formulas of `expected`, from transformers' modeling_*.py.
    """
    tensors, stored = context.canonical_tensors, context.canonical_stored
    wrong: dict[str, str] = {}
    wide = narrow = True
    for name, shape, _, _ in _wanted(context):
        tensor, matrix = tensors.get(name), stored.get(name.removesuffix(".weight"))
        if matrix is not None and matrix.quantized:
            found: tuple[int, ...] = matrix.shape
            if matrix.layout in (Layout.BROKEN, Layout.STACKED) or len(shape) != 2:
                continue
        elif tensor is not None:
            found = tensor.shape
        else:
            continue
        if found != shape:
            own = matrix.tensors[0] if matrix is not None else name
            wrong[own] = f"{list(found)} instead of {list(shape)}"
            matrices = len(shape) == len(found) == 2
            wide &= matrices and all(map(ge, found, shape))
            narrow &= matrices and all(map(ge, shape, found)) and name.endswith(_FEED_FORWARD)
    if not wrong:
        return
    first = next(iter(wrong))
    for engine in context.engines:
        # Loaders take a rank's rows or columns from a matrix, and leave the rest of a wider one;
        # SGLang's fill up narrower ones with zeros (linear.py pad_or_narrow_weight).
        cut = wide and engine != "hf"
        padded = narrow and engine == "sglang"
        yield Finding(
            "D-25",
            engine,
            Effect.WRONG if cut else Effect.RISK if padded else Effect.CRASH,
            tuple(wrong),
            f"the shape isn't what config.json says: {first} is {wrong[first]}",
            Remedy("give config.json the sizes that the tensors have", Mend.MISSING),
            ""
            if cut or padded
            else "the size of the tensor must match the size of the loaded weight",
        )


@rule("D-20", "the MTP block is whole", ("vllm", "sglang"), needs=("tensors",))
def drafter(context: Context) -> Iterator[Finding]:
    """Where the config has MTP layers their tensors are there, all of them, and the other way round.

    Source: vLLM's models/qwen3_5_mtp.py, SGLang's models/qwen3_5_mtp.py; what is missing stays
    uninitialized and no draft is ever accepted (sglang#35797).
    """
    if context.expected is None:
        return
    present = _present(context)
    wanted = [name for name, _, part, _ in _wanted(context) if part is Part.MTP]
    absent = tuple(name for name in wanted if name not in present)
    held = tuple(name for name in context.view.tensors if name.startswith("mtp."))
    asked = "mtp_num_hidden_layers" in context.view.text_config
    if held and not wanted:
        key = "mtp_num_hidden_layers"
        dotted = f"text_config.{key}" if "text_config" in context.view.config else key
        layers = {n.split(".")[2] for n in held if n.startswith("mtp.layers.")}
        yield Finding(
            "D-20",
            "",
            Effect.RISK,
            held,
            "an MTP block that the config doesn't name, so nothing can draft with it",
            Remedy(f"set {dotted} to {len(layers)}", Mend.CONFIG, values={dotted: len(layers)}),
        )
    elif absent and (held or asked):
        dotted = "text_config." if "text_config" in context.view.config else ""
        yield Finding(
            "D-20",
            "",
            Effect.RISK,
            absent,
            "missing of the MTP block: speculative decoding would draft with what is in memory",
            Remedy(
                f"take the block from the original, or set {dotted}mtp_num_hidden_layers to 0",
                Mend.CONFIG,
                values={f"{dotted}mtp_num_hidden_layers": 0},
            ),
        )


def _ties(context: Context) -> Mapping[str, bool]:
    """Engine -> whether it takes the head for the embedding."""
    config, text = context.view.config, context.view.text_config
    fallback = context.expected.tied if context.expected is not None else False
    top = config.get("tie_word_embeddings")
    inner = text.get("tie_word_embeddings")
    of_text = inner if inner is not None else top
    of_top = top if top is not None else inner
    return {
        "vllm": fallback if of_text is None else bool(of_text),
        "sglang": fallback if of_top is None else bool(of_top),
        "hf": fallback if of_top is None else bool(of_top),
    }


@rule("D-22", "tied heads", needs=("tensors",))
def tied(context: Context) -> Iterator[Finding]:
    """A head of its own is there where tie_word_embeddings is false, and both levels agree on it.

    Source: vLLM's models/qwen3_5.py (text_config) and config/model.py, SGLang's
    models/qwen3_vl.py (top level), transformers' modeling_utils.py tie_weights.
    """
    expected, view = context.expected, context.view
    if expected is None:
        return
    head = next((n for n in expected.parameters if n.endswith("lm_head.weight")), "")
    embedding = f"{expected.prefix}embed_tokens.weight"
    present = _present(context)
    if embedding not in present or not head:
        return
    ties = _ties(context)
    top, inner = (part.get("tie_word_embeddings") for part in (view.config, view.text_config))
    differ = top is not None and inner is not None and bool(top) != bool(inner)
    for engine in context.engines:
        if ties[engine] or head in present:
            continue
        keys = ["tie_word_embeddings"] + ["text_config.tie_word_embeddings"] * (
            view.text_config is not view.config
        )
        yield Finding(
            "D-22",
            engine,
            Effect.WRONG,
            (head,),
            "missing, and tie_word_embeddings is false",
            Remedy(
                "set tie_word_embeddings to true where the model is tied, else take the head from the "
                "original",
                Mend.CONFIG,
                values=dict.fromkeys(keys, True),
            ),
        )
    if differ:
        yield Finding(
            "D-22",
            "",
            Effect.RISK if head not in present else Effect.WRONG,
            ("config.json",),
            f"tie_word_embeddings is {top} at the top and {inner} in text_config, and engines read "
            "one or the other",
            Remedy(
                "write one value at both places",
                Mend.CONFIG,
                values=dict.fromkeys(
                    ("tie_word_embeddings", "text_config.tie_word_embeddings"), head not in present
                ),
            ),
        )
