"""The names that a table's expressions can use: keys, shapes, tokens, variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gguf2st.errors import InputError
from gguf2st.gguf.container import TensorInfo
from gguf2st.gguf.model import PROJECTOR_ARCHITECTURE, GgufModel
from gguf2st.mapping.expression import ExpressionError
from gguf2st.mapping.rope import recover_llama3, standard_scaling
from gguf2st.mapping.table import Pattern, Table
from gguf2st.mapping.view import read_whole

_REQUIRED = object()


class Environment(dict[str, Any]):
    """Functions and variables of one table over one GGUF.

    Raises `InputError` when a needed key is missing or a check of the table fails.
    """

    def __init__(self, table: Table, model: GgufModel, prefix: str) -> None:
        super().__init__()
        vision = table.component != "text"
        source = model.projector if vision else model.language
        assert source is not None
        self._path = source.path
        self._tensors: Mapping[str, TensorInfo] = source.tensors if vision else model.tensors
        self._metadata = source.metadata if vision else model.metadata
        self._prefix = PROJECTOR_ARCHITECTURE if vision else model.architecture
        self._language = model
        self._tokens: dict[str, int] | None = None
        self.update(
            P=prefix,
            architecture=model.architecture,
            multimodal=model.projector is not None,
            kv=self.kv,
            text_kv=self.text_kv,
            has=self.has,
            shape=self.shape,
            token=self.token,
            token_id=self.token_id,
            llama3_rope=self.llama3_rope,
            standard_rope=self.standard_rope,
        )
        for name, expression in table.variables.items():
            self[name] = self._evaluate(expression, name)
        for message, check in table.checks.items():
            if not self._evaluate(check, message):
                raise InputError(
                    f"{self._path} contradicts itself: {message} ({check.source} doesn't hold); "
                    "it was made by a faulty converter, convert the original again."
                )

    def _evaluate(self, expression: Any, name: str) -> Any:
        try:
            return expression.evaluate(self)
        except ExpressionError as error:
            raise InputError(f"{self._path}: {name} can't be derived: {error}.") from error

    def kv(self, name: str, default: Any = _REQUIRED) -> Any:
        """The key `name` with the architecture's prefix; lists for arrays."""
        return self._look_up(self._metadata, f"{self._prefix}.{name}", default)

    def text_kv(self, name: str, default: Any = _REQUIRED) -> Any:
        """The same of the language model, for a projector's table."""
        full = f"{self._language.architecture}.{name}"
        return self._look_up(self._language.metadata, full, default)

    def _look_up(self, metadata: Mapping[str, Any], name: str, default: Any) -> Any:
        value = metadata.get(name)
        if value is None:
            if default is _REQUIRED:
                raise InputError(
                    f"{self._path} lacks the key {name}, without which the model can't be described; "
                    "convert it again with a current llama.cpp."
                )
            return default
        return _plain(value)

    def has(self, pattern: str) -> bool:
        """Whether a tensor of that name is there; {layer} and {expert} stand for any number."""
        return self._find(pattern) is not None

    def shape(self, pattern: str) -> list[int]:
        """Shape in torch order of the first tensor that matches."""
        found = self._find(pattern)
        if found is None:
            raise InputError(
                f"{self._path} has no tensor {pattern}, from whose shape the configuration follows; "
                "the file is incomplete, convert it again."
            )
        return list(found.shape)

    def _find(self, pattern: str) -> TensorInfo | None:
        if "{" not in pattern:
            return self._tensors.get(pattern)
        compiled = Pattern(pattern)
        return next((t for name, t in self._tensors.items() if compiled.match(name)), None)

    def token(self, text: str) -> int | None:
        """Id of the token with that text, or None."""
        if self._tokens is None:
            tokens = self._language.metadata.get("tokenizer.ggml.tokens") or []
            self._tokens = {token: number for number, token in enumerate(tokens)}
        return self._tokens.get(text)

    def token_id(self, kind: str) -> int | None:
        """`tokenizer.ggml.KIND_token_id`: "bos", "eos", "padding", ..., or None."""
        found = self._language.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return None if found is None else int(found)

    def llama3_rope(self, tensor: str, dimension: int, base: float) -> dict[str, Any] | None:
        """Llama 3 rope parameters recovered from the tensor of factors; None without it."""
        found = self._tensors.get(tensor)
        if found is None:
            return None
        hint = self.kv("rope.scaling.original_context_length", None)
        return recover_llama3(read_whole(found), dimension, base, hint)

    def standard_rope(self) -> dict[str, Any]:
        """Rope parameters of the `rope.scaling.*` keys."""
        return standard_scaling(self.kv)


def _plain(value: Any) -> Any:
    """A key's value as expressions see it.

    The file holds float32; the shortest decimal that reads back the same is what
    the original configuration said (1e-06, not 9.999999974752427e-07).
    """
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
