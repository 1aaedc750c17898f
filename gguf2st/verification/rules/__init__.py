"""The rules, registered when their files are imported; in the order of a report."""

from gguf2st.verification.rules import (
    config,
    files,
    forms,
    matching,
    parameters,
    schema,
    shapes,
    values,
)

__all__ = ["config", "files", "forms", "matching", "parameters", "schema", "shapes", "values"]
