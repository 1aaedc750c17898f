"""Keys that hold something else than they should: a sentence comes back, and soon."""

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf2st.errors import Gguf2stError
from gguf2st.gguf import GgufModel, open_model
from gguf2st.options import PlanOptions
from gguf2st.plan import make_plan

FOLDER = Path(__file__).parents[2] / "fixtures" / "qwen35moe-small"
SECONDS = 10
VALUES = [
    pytest.param(None, id="absent"),
    pytest.param(2**32 - 1, id="large"),
    pytest.param(float("inf"), id="infinity"),
    pytest.param("\udcff", id="text"),
    pytest.param(np.array([0.5, np.nan], np.float32), id="numbers"),
]


def stop(_signal, _frame):
    raise TimeoutError


@pytest.fixture(scope="module")
def model():
    return open_model(FOLDER / f"{FOLDER.name}-bf16.gguf", next(FOLDER.glob("mmproj-*.gguf")))


def changed(source, name, value):
    metadata = {key: source.metadata[key] for key in source.metadata} | {name: value}
    if value is None:
        del metadata[name]
    return replace(source, metadata=metadata)


@pytest.mark.parametrize("value", VALUES)
def test_every_key(model, value):
    signal.signal(signal.SIGALRM, stop)
    escaped = {}
    for role in ("language", "projector"):
        for name in getattr(model, role).metadata:
            other = {role: changed(getattr(model, role), name, value)}
            language = other.get("language", model.language)
            projector = other.get("projector", model.projector)
            damaged = GgufModel(language, projector, None, language.metadata, model.tensors)
            signal.alarm(SECONDS)
            try:
                make_plan(damaged, PlanOptions())
            except Gguf2stError as error:
                assert "\n" not in str(error)
            except Exception as error:
                escaped[name] = repr(error)
            finally:
                signal.alarm(0)
    assert not escaped


def test_billions_of_experts_that_a_table_names_one_by_one():
    folder = FOLDER.parent / "qwen3moe-small"
    language = open_model(folder / f"{folder.name}-bf16.gguf").language
    damaged = changed(language, "qwen3moe.expert_count", 2**32 - 1)
    model = GgufModel(damaged, None, None, damaged.metadata, damaged.tensors)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with pytest.raises(Gguf2stError, match="lacks tensor"):
            make_plan(model, PlanOptions())
    finally:
        signal.alarm(0)
