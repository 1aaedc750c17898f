"""Law 2: what the config says, by each engine's own rules, against what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gguf2st.engines.base import Checkpoint, Config, Engine, EngineModule
from gguf2st.engines.configs import same_scheme
from gguf2st.scheme import Scheme


def contradictions(
    engine: Engine,
    model_class: str,
    quantized: Mapping[str, Scheme],
    unquantized: Sequence[str],
    config: Config,
    plain: Sequence[str] = (),
    *,
    drafter: bool = False,
) -> list[str]:
    """Sentences about layers that the engine would take for something else than was written.

    `quantized` and `unquantized` are modules (no leaf), `config` is the
    quantization_config. `plain` are names of unquantized tensors, which matter only for
    an AWQ config without a list of exceptions; by default each module has a weight.
    With `drafter` they are about the MTP drafter instead, which only speculative decoding needs.
    """
    method = config["quant_method"]
    if method in engine.unchecked:
        return []
    checkpoint = Checkpoint(
        frozenset(quantized), plain or [f"{name}.weight" for name in unquantized]
    )
    modules = engine.module_names(model_class, [*quantized, *unquantized])
    found = [
        f"{engine.title} has no linear layer {name}, which is written as {scheme}"
        for name, scheme in quantized.items()
        if modules[name] is None and not drafter
    ]
    distinct = {id(m): m for m in modules.values() if m is not None and m.drafter is drafter}
    named = {module.name: module for module in distinct.values()}
    for module in distinct.values():
        found += _of_module(engine, model_class, module, quantized, config, checkpoint)
        partner = named.get(module.partner)
        if partner and quantized.get(partner.shards[0]) != quantized.get(module.shards[0]):
            found.append(
                f"{engine.title} joins {module.name} with {partner.name}, but they are written as "
                f"{quantized.get(module.shards[0], 'unquantized')} and "
                f"{quantized.get(partner.shards[0], 'unquantized')}"
            )
    return list(dict.fromkeys(found))


def _of_module(
    engine: Engine,
    model_class: str,
    module: EngineModule,
    quantized: Mapping[str, Scheme],
    config: Config,
    checkpoint: Checkpoint,
) -> Iterable[str]:
    who = f"{engine.title}'s drafter" if module.drafter else engine.title
    name = _called(module)
    schemes = {quantized.get(shard) for shard in module.shards}
    if len(schemes) > 1:
        written = ", ".join(sorted(str(scheme or "unquantized") for scheme in schemes))
        yield f"{who} loads {name} as one matrix, but its parts are written as {written}"
        return
    written_as = schemes.pop()
    if written_as is not None and module.unquantized:
        yield f"{name} is written as {written_as}, but {module.unquantized}"
        return
    if (
        written_as is None
        and not (module.drafter or module.unquantized)
        and (config["quant_method"], module.kind) in engine.never_excepted
    ):
        yield f"{who} can't except {name} from {config['quant_method']}"
        return
    outcome = engine.outcome(model_class, module, config, checkpoint)
    because = f" (by {outcome.rule!r})" if outcome.rule else ""
    if outcome.error:
        yield f"{who} refuses {name}: {outcome.error}"
    elif written_as is None and outcome.scheme is not None:
        yield f"{who} takes {name} for {outcome.scheme}{because}, but it isn't quantized"
    elif written_as is not None and outcome.scheme is None:
        yield f"{who} takes {name} for unquantized, but it is written as {written_as}"
    elif (
        written_as is not None
        and outcome.scheme is not None
        and not same_scheme(written_as, outcome.scheme, config["quant_method"])
    ):
        yield f"{who} takes {name} for {outcome.scheme}{because}, but it is written as {written_as}"


def _called(module: EngineModule) -> str:
    """The engine's name, with the checkpoint's where a reader wouldn't find it by that."""
    first = module.shards[0]
    same = module.name == first or (len(module.shards) > 1 and module.name in first)
    return module.name if same else f"{module.name} ({first})"


def partners(engines: Iterable[Engine], model_class: str, names: Sequence[str]) -> list[list[str]]:
    """Modules that must share one scheme because some engine makes one layer of them, or
    calls several layers by one name. Groups are in the order of their first name.
    """
    parent = {name: name for name in names}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for engine in engines:
        first: dict[tuple[str, bool], str] = {}
        for name, module in engine.module_names(model_class, names).items():
            if module is not None:
                for layer in filter(None, (module.name, module.partner)):
                    key = (layer, module.drafter)
                    parent[root(name)] = root(first.setdefault(key, name))
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(root(name), []).append(name)
    return list(groups.values())
