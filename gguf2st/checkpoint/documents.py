"""All files of the output that aren't weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf2st.checkpoint.chat_template import chat_templates
from gguf2st.checkpoint.config import build_config, build_processor_files
from gguf2st.checkpoint.generation import generation_config
from gguf2st.checkpoint.model_card import model_card
from gguf2st.checkpoint.original import merge_config, read_tokenizer_files
from gguf2st.checkpoint.tokenizer import build_tokenizer
from gguf2st.mapping import Resolution
from gguf2st.targets import Target


@dataclass
class Documents:
    """File name -> text, with what the user should hear about them.

    `differences` says where an original file and the GGUF don't agree.
    """

    texts: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    config: dict[str, Any] = field(default_factory=dict)

    def with_quantization(self, quantization: dict[str, Any] | None) -> dict[str, str]:
        """The texts, with `quantization_config` in config.json."""
        if quantization is None:
            return dict(self.texts)
        config = self.config | {"quantization_config": quantization}
        return self.texts | {"config.json": self.as_json(config)}

    @staticmethod
    def as_json(content: Any) -> str:
        """JSON text as Hugging Face writes it."""
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def build_documents(
    resolution: Resolution,
    target: Target,
    *,
    tokenizer_from: Path | None,
    config_from: Path | None,
) -> Documents:
    """config.json, tokenizer, chat template, generation, processor files and the model card.

    Raises `InputError` or `UnsupportedError` when one of them can't be made from the GGUF.
    """
    documents = Documents()
    config = build_config(resolution, target.torch_dtype)
    if config_from is not None:
        config, differences = merge_config(config, config_from)
        documents.differences += differences
    documents.config = config
    documents.texts["config.json"] = documents.as_json(config)
    _add_tokenizer(documents, resolution, config, tokenizer_from)
    generation = generation_config(resolution.model.metadata, warnings=documents.warnings)
    documents.texts["generation_config.json"] = documents.as_json(generation)
    for name, content in build_processor_files(resolution).items():
        documents.texts[name] = documents.as_json(content)
    documents.texts["README.md"] = model_card(resolution, target)
    return documents


def _add_tokenizer(
    documents: Documents,
    resolution: Resolution,
    config: dict[str, Any],
    tokenizer_from: Path | None,
) -> None:
    metadata = resolution.model.metadata
    text_config = config.get("text_config", config)
    if tokenizer_from is not None:
        texts, differences = read_tokenizer_files(
            tokenizer_from, metadata, int(text_config["vocab_size"])
        )
        documents.texts |= texts
        documents.differences += differences
        if not any(name.startswith("chat_template") for name in texts):
            _add_chat_templates(documents, resolution)
        return
    files = build_tokenizer(
        metadata,
        vocab_size=int(text_config["vocab_size"]),
        max_length=int(text_config["max_position_embeddings"]),
    )
    tokenizer_config = dict(files.tokenizer_config)
    if resolution.vision_table is not None:
        tokenizer_config |= resolution.vision_table.tokenizer
    documents.texts["tokenizer.json"] = json.dumps(files.tokenizer_json, ensure_ascii=False)
    documents.texts["tokenizer_config.json"] = documents.as_json(tokenizer_config)
    documents.warnings += files.warnings
    _add_chat_templates(documents, resolution)


def _add_chat_templates(documents: Documents, resolution: Resolution) -> None:
    templates = chat_templates(resolution.model.metadata, warnings=documents.warnings)
    documents.texts |= templates
    if not templates:
        documents.warnings.append(
            "the GGUF has no chat template, so none is written; chat requests need --chat-template"
        )
