"""README.md of the output: where the weights come from and what was done to them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gguf2st.mapping import Resolution
from gguf2st.targets import Target


def package_version() -> str:
    """Version of this package."""
    try:
        return version("gguf2st")
    except PackageNotFoundError:  # run from a checkout that isn't installed
        return "unknown"


def model_card(resolution: Resolution, target: Target) -> str:
    """Text of the card, with the licence and base model that the GGUF names."""
    metadata = resolution.model.metadata
    front = ["---"]
    if license_name := metadata.get("general.license"):
        front.append(f"license: {_one_line(license_name)}")
    if base := metadata.get("general.base_model.0.repo_url"):
        front.append(f"base_model: {_one_line(base).removeprefix('https://huggingface.co/')}")
    front += ["library_name: transformers", "---", ""]
    name = metadata.get("general.name") or resolution.model.language.path.stem
    lines = [
        f"# {_one_line(name)}",
        "",
        f"Converted by gguf2st {package_version()} to {target.torch_dtype} safetensors. The weights are "
        "those of the GGUF files below: what their quantization lost is lost here too.",
        "",
        "| file | architecture | tensors by type |",
        "|---|---|---|",
    ]
    for source in resolution.model.sources:
        types = ", ".join(f"{count} {kind}" for kind, (count, _) in source.type_histogram().items())
        lines.append(f"| {_one_line(source.path.name)} | {source.architecture} | {types} |")
    return "\n".join([*front, *lines, ""])


def _one_line(value: Any) -> str:
    """A text from a file as one harmless line of Markdown."""
    text = str(value).encode("utf-8", "replace").decode()
    return " ".join(text.split())[:200].replace("|", "\\|")
