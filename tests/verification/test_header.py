"""Headers of any content are read without an exception, and their mistakes are told."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from gguf2st.verification.header import read_header
from tests.conversions import cases, converted

SOUND: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def written(path: Path, header: Any, data: int = 32, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)
    )
    return path


def changed(**entries: Any) -> dict[str, Any]:
    return {name: entry for name, entry in (SOUND | entries).items() if entry is not None}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def opens(path: Path) -> bool:
    """Whether safetensors' own reader takes the file."""
    try:
        with safe_open(path, "np"):
            return True
    except SafetensorError:
        return False


def test_a_sound_one(file: Path) -> None:
    header = read_header(written(file, SOUND))
    assert not header.problems and not header.missing_bytes and not header.without_data
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in header.tensors.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (4,), 8),
    }
    assert header.tensors["b"].offset == header.data_start + 24


def test_the_same_as_safetensors_reads() -> None:
    path = converted(cases()[0]) / "model.safetensors"
    header = read_header(path)
    with safe_open(path, "np") as shard:
        assert set(shard.keys()) == set(header.tensors)
        for name, tensor in header.tensors.items():
            piece = shard.get_slice(name)
            assert (piece.get_dtype(), tuple(piece.get_shape())) == (tensor.dtype, tensor.shape)


MISTAKES = {
    "no JSON": (b"{nothing}", {}, "isn't JSON"),
    "a list": (b"[1, 2]", {}, "isn't a JSON object"),
    "not UTF-8": (b'{"\xff": 1}', {}, "isn't JSON"),
    "deep": (b'{"a":' * 100_000, {}, "isn't JSON"),
    "huge length": (SOUND, {"length": 1 << 62}, "announce a header of"),
    "longer than the file": (SOUND, {"length": 10_000}, "announce a header of"),
    "unknown dtype": (changed(a={"dtype": "F3", "shape": [6], "data_offsets": [0, 24]}), {}, "dtype 'F3'"),
    "negative shape": (changed(a={"dtype": "F32", "shape": [-6], "data_offsets": [0, 24]}), {}, "shape"),
    "huge shape": (
        changed(a={"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 24]}), {}, "takes"),
    "offsets reversed": (
        changed(a={"dtype": "F32", "shape": [6], "data_offsets": [24, 0]}), {}, "begin and an end"),
    "too few bytes": (changed(a={"dtype": "F32", "shape": [7], "data_offsets": [0, 24]}), {}, "takes 28"),
    "overlap": (changed(b={"dtype": "BF16", "shape": [4], "data_offsets": [20, 28]}), {}, "overlaps"),
    "gap": (changed(b={"dtype": "BF16", "shape": [4], "data_offsets": [28, 36]}), {"data": 36}, "gap"),
    "named twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', {"data": 2}, "names it twice"),
    "more data": (SOUND, {"data": 40}, "8 bytes follow"),
    "metadata of numbers": (changed(__metadata__={"format": 1}), {}, "__metadata__"),
    "no object": (changed(a=5), {}, "isn't an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, file: Path) -> None:
    content, arguments, text = MISTAKES[name]
    header = read_header(written(file, content, **arguments))
    assert text in " ".join(problem.text for problem in header.problems)
    if name != "named twice":  # of which safetensors keeps the last
        assert not opens(file)


def test_an_empty_file(file: Path) -> None:
    file.write_bytes(b"")
    assert "too few" in read_header(file).problems[0].text


def test_files_that_end_early(file: Path) -> None:
    """Right behind the header: nothing was meant to follow. Within the data: it was cut off."""
    alone = read_header(written(file, SOUND, data=0))
    assert alone.without_data and alone.missing_bytes == 32 and not alone.problems
    cut = read_header(written(file, SOUND, data=30))
    assert not cut.without_data and cut.missing_bytes == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRY | JSON),
    st.binary(max_size=40),
)
def test_anything(tmp_path_factory: pytest.TempPathFactory, entries: Any, data: bytes) -> None:
    """No content raises, and whatever safetensors refuses isn't called sound."""
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    written(file, entries)
    header = read_header(file)
    if not opens(file):
        assert header.problems or header.missing_bytes
    file.write_bytes(data)
    read_header(file)
