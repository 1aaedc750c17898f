"""Rules about files: headers, the index, and what has to lie beside the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gguf2st.verification.checkpoint import INDEX
from gguf2st.verification.context import Context
from gguf2st.verification.finding import Effect, Finding, Mend, Remedy, rule

_REINDEX = Remedy("write the index anew from the files' headers", Mend.INDEX)


@rule("D-37", "sound headers")
def sound_headers(context: Context) -> Iterator[Finding]:
    """Offsets follow one another and lie in the file, dtypes are known, names come once.

    Source: safetensors' tensor.rs, Metadata::validate and SafeTensors::read_metadata.
    """
    again = Remedy("fetch the file again, or write it again", Mend.MISSING)
    for header in context.view.headers:
        if header.problems:
            first = header.problems[0]
            more = f"; {len(header.problems) - 1} more" if len(header.problems) > 1 else ""
            where = f"{first.tensor}: " if first.tensor else ""
            yield Finding(
                "D-37",
                "",
                Effect.CRASH,
                (header.file, *(p.tensor for p in header.problems if p.tensor)),
                f"the header is damaged: {where}{first.text}{more}",
                again,
                "SafetensorError: Error while deserializing header",
            )
        elif header.missing_bytes and not context.view.headers_only:
            yield Finding(
                "D-37",
                "",
                Effect.CRASH,
                (header.file,),
                f"the file ends {header.missing_bytes:,} bytes before its last tensor does, and other "
                "files have their data",
                again,
                "SafetensorError: Error while deserializing header: incomplete metadata, file not "
                "fully covered",
            )


@rule("D-36", "index and files agree")
def index_agrees(context: Context) -> Iterator[Finding]:
    """The index names each tensor with the file that has it, each file exists, none is left over.

    Source: transformers' modeling_utils.py and utils/hub.py get_checkpoint_shard_files; vLLM's
    model_loader/weight_utils.py filter_duplicate_safetensors_files, which SGLang has, too.
    """
    view = context.view
    if INDEX in view.unreadable or (INDEX in view.files and view.weight_map is None):
        reason = view.unreadable.get(INDEX, "it has no weight_map")
        yield Finding("D-36", "", Effect.CRASH, (INDEX,), f"can't be read: {reason}", _REINDEX)
        return
    held = Counter(name for header in view.headers for name in header.tensors)
    twice = tuple(name for name, count in held.items() if count > 1)
    if twice:
        yield Finding(
            "D-36",
            "",
            Effect.WRONG,
            twice,
            "in more than one file; the one that is read last wins",
            Remedy("leave each tensor in one file", Mend.DROP),
        )
    if view.weight_map is None:
        yield from _without_index(context)
        return
    absent = tuple(sorted({f for f in view.weight_map.values() if f not in view.files}))
    if absent:
        yield Finding(
            "D-36",
            "",
            Effect.CRASH,
            absent,
            f"named in {INDEX}, but not there",
            Remedy("fetch the files", Mend.MISSING),
            f"FileNotFoundError: {absent[0]}",
        )
    if view.strays:
        yield Finding(
            "D-36",
            "",
            Effect.RISK,
            tuple(header.file for header in view.strays),
            "not named in the index: vLLM, SGLang and transformers leave it aside, tools that read "
            "every *.safetensors don't",
            Remedy("remove the file, or name its tensors in the index", Mend.DROP),
        )
    yield from _misplaced(context)


def _without_index(context: Context) -> Iterator[Finding]:
    names = [header.file for header in context.view.headers]
    if len(names) > 1 or (names and names[0] != "model.safetensors"):
        yield Finding(
            "D-36",
            "hf",
            Effect.CRASH,
            tuple(names),
            f"there is no {INDEX}, and transformers looks for model.safetensors otherwise",
            _REINDEX,
            "OSError: Error no file named model.safetensors, or pytorch_model.bin, found",
        )
    elif not names:
        yield Finding(
            "D-36",
            "",
            Effect.CRASH,
            (),
            "there is no safetensors file",
            Remedy("fetch the weights", Mend.MISSING),
        )


def _misplaced(context: Context) -> Iterator[Finding]:
    view = context.view
    places = view.weight_map or {}
    unnamed = tuple(name for name in view.tensors if name not in places)
    if unnamed:
        # transformers looks names up in the files; the others read whole files.
        yield Finding("D-36", "", Effect.RISK, unnamed, "in a file, but not in the index", _REINDEX)
    found = {name: header.file for header in view.headers for name in header.tensors}
    absent = tuple(
        name for name, file in places.items() if file in view.files and name not in found
    )
    if absent:
        yield Finding("D-36", "", Effect.RISK, absent, "in the index, but in no file", _REINDEX)
    moved = tuple(
        n for n, file in places.items() if file in view.files and found.get(n, file) != file
    )
    if moved:
        yield Finding(
            "D-36", "", Effect.RISK, moved, "in another file than the index says", _REINDEX
        )
    index = view.documents[INDEX]
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(header.data_bytes for header in view.headers)
    if isinstance(total, int) and total != actual and not (unnamed or absent):
        yield Finding(
            "D-36",
            "",
            Effect.NOTE,
            (INDEX,),
            f"total_size is {total:,}, and the tensors take {actual:,} bytes",
            _REINDEX,
        )


# What a processor of images reads; SGLang fails without (sglang#22885).
_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


@rule("D-38", "files beside the weights")
def files_beside(context: Context) -> Iterator[Finding]:
    """config.json, a tokenizer, and for vision a preprocessor's config.

    Source: transformers' AutoConfig, AutoTokenizer and AutoProcessor; SGLang's
    managers/multimodal_processor.py (sglang#22885).
    """
    view = context.view
    parsed = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for name in parsed:
        if name in view.unreadable:
            yield Finding(
                "D-38",
                "",
                Effect.CRASH,
                (name,),
                f"isn't JSON ({view.unreadable[name]})",
                Remedy("take the file of the original model", Mend.MISSING),
            )
    if "config.json" not in view.files:
        yield Finding(
            "D-38",
            "",
            Effect.CRASH,
            ("config.json",),
            "isn't there",
            Remedy("take the file of the original model", Mend.MISSING),
            "OSError: does not appear to have a file named config.json",
        )
    elif not view.model_class and "config.json" not in view.unreadable:
        yield Finding(
            "D-38",
            "",
            Effect.CRASH,
            ("config.json",),
            "has no architectures, so no engine knows the model class",
            Remedy('add "architectures" as in the original model', Mend.MISSING),
            "Model architectures [] are not supported for now",
        )
    yield from _tokenizer(context)
    if isinstance(view.config.get("vision_config"), dict) and not any(
        name in view.files for name in _PROCESSOR
    ):
        for engine in ("vllm", "sglang", "hf"):
            yield Finding(
                "D-38",
                engine,
                Effect.CRASH if engine != "hf" else Effect.RISK,
                ("preprocessor_config.json",),
                "isn't there, and the model has a vision tower",
                Remedy("take the file of the original model", Mend.MISSING),
                "OSError: Can't load image processor" if engine != "hf" else "",
            )


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


def _tokenizer(context: Context) -> Iterator[Finding]:
    view = context.view
    fetch = Remedy("take the file of the original model", Mend.MISSING)
    if not any(name in view.files for name in _TOKENIZERS) and view.files != {"config.json"}:
        for engine in context.engines:
            yield Finding(
                "D-38",
                engine,
                Effect.CRASH if engine != "hf" else Effect.RISK,
                ("tokenizer.json",),
                "isn't there, nor another tokenizer",
                fetch,
                "OSError: Can't load tokenizer" if engine != "hf" else "",
            )
        return
    settings = view.documents.get("tokenizer_config.json")
    inline = isinstance(settings, dict) and "chat_template" in settings
    if not inline and not any(name.startswith("chat_template") for name in view.files):
        yield Finding(
            "D-38",
            "",
            Effect.NOTE,
            (),
            "there is no chat template, so chat requests need --chat-template",
            fetch,
        )
