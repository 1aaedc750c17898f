"""The chat templates of a GGUF, as the files that Hugging Face keeps them in.

`tokenizer.chat_template` holds the default and `tokenizer.chat_template.NAME`
any others (`GGUFWriter.add_chat_template` in llama.cpp's
`gguf-py/gguf/gguf_writer.py`; its converter reads them from the files that are
written here, in `gguf-py/gguf/vocab.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_KEY = "tokenizer.chat_template"
_DEFAULT_FILE = "chat_template.jinja"
_OTHERS_FOLDER = "additional_chat_templates"
_LONGEST_NAME = 64
# A template says something by expressions or by statements.
_JINJA = re.compile(r"\{[{%]")


def chat_templates(
    metadata: Mapping[str, Any], *, warnings: list[str] | None = None
) -> dict[str, str]:
    """File name, relative to the checkpoint, to the text of the template.

    The names are safe whatever the file says: one folder deep at most, ASCII
    letters, digits, dash and underscore before the suffix. What isn't Jinja (llama.cpp
    has built-in templates that a file can ask for by name) is left out and
    noted in `warnings`.
    """
    files: dict[str, str] = {}
    notes: list[str] = [] if warnings is None else warnings
    default = metadata.get(_KEY)
    if default is not None and _is_jinja(default, _KEY, notes):
        files[_DEFAULT_FILE] = default
    taken: set[str] = set()
    for key in sorted(key for key in metadata if key.startswith(_KEY + ".")):
        template = metadata[key]
        if not _is_jinja(template, key, notes):
            continue
        name = _safe_name(key.removeprefix(_KEY + "."), taken)
        taken.add(name.lower())
        if name == "default":
            # A file of this name would take the place of the default template.
            files.setdefault(_DEFAULT_FILE, template)
        else:
            files[f"{_OTHERS_FOLDER}/{name}.jinja"] = template
    return files


def _is_jinja(template: object, key: str, notes: list[str]) -> bool:
    if not isinstance(template, str):
        notes.append(f"the key {key} holds no text, so that chat template isn't written")
        return False
    if _JINJA.search(template):
        return True
    notes.append(
        f"the key {key} is {template!r:.60}, the name of a template inside llama.cpp and not a "
        "template, so none is written for it"
    )
    return False


def _safe_name(name: str, taken: set[str]) -> str:
    """`name` as a file name, different from `taken` on file systems that ignore case too."""
    safe = re.sub(r"[^0-9A-Za-z_-]", "_", name)[:_LONGEST_NAME] or "unnamed"
    unique, number = safe, 2
    while unique.lower() in taken:
        unique, number = f"{safe}_{number}", number + 1
    return unique
