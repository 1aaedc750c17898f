"""Shards as safetensors' own reader and writer see them, and output that is complete or absent."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from gguf2st import OutputError, convert
from gguf2st.checkpoint.writer import ShardWriter, appearing_directory, index_document, lay_out
from gguf2st.targets import TensorSpec

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODEL = FIXTURES / "llama-small" / "llama-small-bf16.gguf"
DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


# --- layout -----------------------------------------------------------------------------------


def some_tensors():
    """Tensors of every dtype and of odd shapes, by name."""
    shapes = [(), (1,), (3,), (5, 7), (1, 1, 1), (2, 3, 1, 5), (2, 1, 3, 1, 2), (257,), (4, 4)]
    random = torch.Generator().manual_seed(0)
    return {
        f"layer.{name}.{number}": torch.randint(0, 100, shape, generator=random).to(dtype)
        for name, dtype in DTYPES.items()
        for number, shape in enumerate(shapes)
    }


def specs_of(tensors):
    names = {dtype: name for name, dtype in DTYPES.items()}
    return [TensorSpec(name, names[t.dtype], tuple(t.shape)) for name, t in tensors.items()]


def raw_bytes(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def write_all(directory, tensors, maximum_bytes):
    """Write tensors in pieces of 13 bytes, last ones first."""
    placements, shards = lay_out(specs_of(tensors), maximum_bytes)
    writer = ShardWriter(directory, shards)
    for placement in reversed(placements):
        data = raw_bytes(tensors[placement.spec.name])
        for start in reversed(range(0, len(data), 13)):
            writer.write(placement.shard, placement.offset + start, data[start : start + 13])
    writer.close(durable=True)
    return placements, shards


def header_of(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return raw[: 8 + length], json.loads(raw[8 : 8 + length]), len(raw) - 8 - length


def test_one_shard_is_what_safetensors_writes(tmp_path):
    """The same header byte for byte, where safetensors' order of dtypes is ours too."""
    tensors = {
        name: tensor
        for name, tensor in sorted(some_tensors().items())
        if tensor.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8)
    }
    write_all(tmp_path, tensors, 10**9)
    theirs = safetensors.torch.save(tensors, {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == theirs


@pytest.mark.parametrize("limit", [1, 100, 500, 1500, 10**9])
def test_shards_are_read_by_safetensors(tmp_path, limit):
    tensors = some_tensors()
    placements, shards = write_all(tmp_path, tensors, limit)
    count = len(shards)
    found = {}
    for number, shard in enumerate(shards):
        expected = f"model-{number + 1:05}-of-{count:05}.safetensors"
        assert shard.file_name == ("model.safetensors" if count == 1 else expected)
        path = tmp_path / shard.file_name
        header, entries, data = header_of(path)
        assert path.stat().st_size == shard.nbytes
        assert len(header) % 8 == 0
        assert entries.pop("__metadata__") == {"format": "pt"}
        assert data <= limit or len(entries) == 1
        spans = sorted(entry["data_offsets"] for entry in entries.values())
        assert spans[0][0] == 0
        assert spans[-1][1] == data
        assert all(end == begin for (_, end), (begin, _) in pairwise(spans))
        for entry in entries.values():  # every tensor can be viewed in place
            assert entry["data_offsets"][0] % DTYPES[entry["dtype"]].itemsize == 0
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert raw_bytes(found[name]) == raw_bytes(tensor)
    index = index_document(placements, shards)
    if count == 1:
        assert index is None
    else:
        assert index["metadata"]["total_size"] == sum(len(raw_bytes(t)) for t in tensors.values())
        assert index["weight_map"].keys() == tensors.keys()
        for name, file in index["weight_map"].items():
            assert name in header_of(tmp_path / file)[1]


def test_shards_are_filled_in_order():
    specs = [
        TensorSpec(f"t{number}", "U8", (size,)) for number, size in enumerate([4, 4, 9, 1, 7, 1])
    ]
    placements, shards = lay_out(specs, 8)
    assert [p.shard for p in sorted(placements, key=lambda p: p.spec.name)] == [0, 0, 1, 2, 2, 3]
    assert len(shards) == 4


def test_names_of_any_text(tmp_path):
    tensors = {name: torch.ones(2) for name in ("ä.weight", '"quoted"', "a\\b", "日本語", "\n")}
    write_all(tmp_path, tensors, 10**9)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == tensors.keys()


# --- conversions ------------------------------------------------------------------------------


def contents(directory):
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_the_same_bytes_for_any_number_of_threads_and_any_chunk(tmp_path, monkeypatch):
    found = []
    for number, (threads, chunk) in enumerate(
        [(1, 1 << 20), (2, 1 << 20), (3, 1000), (4, 1000), (4, 64), (1, 1)]
    ):
        for name in ("CHUNK_ELEMENTS", "DIRECT_ELEMENTS"):
            monkeypatch.setattr(sys.modules["gguf2st.run"], name, chunk)
        output = tmp_path / f"run{number}" / "out"
        convert(MODEL, output, threads=threads, max_shard_bytes=40_000)
        found.append(contents(output))
    assert len(found[0]) > 5
    assert all(other == found[0] for other in found)


def test_shards_change_nothing_but_the_files(tmp_path):
    for name, limit in (("whole", 10**9), ("cut", 20_000)):
        convert(MODEL, tmp_path / name, max_shard_bytes=limit)
    whole = safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors")
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    assert len(set(index["weight_map"].values())) > 3
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "cut" / file, framework="pt") as shard:
            assert torch.equal(shard.get_tensor(name), whole[name])
    files = {path.name for path in (tmp_path / "cut").glob("*.safetensors")}
    assert files == set(index["weight_map"].values())


# --- all or nothing ---------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    """The directory beside which nothing may be left."""
    directory = tmp_path / "place"
    directory.mkdir()
    return directory


def left_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


class OwnError(Exception):
    pass


@pytest.mark.parametrize("error", [OwnError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_exception_in_the_middle(place, error):
    calls = 0

    def progress(_progress):
        nonlocal calls
        calls += 1
        assert left_in(place)  # it has begun
        if calls == 3:
            raise error

    with pytest.raises(error):
        convert(MODEL, place / "new" / "deep" / "out", threads=2, progress=progress)
    assert left_in(place) == []


def full_disk(monkeypatch, after):
    write, calls = os.pwrite, 0

    def limited(descriptor, data, offset):
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", limited)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_disk_that_fills_up(place, monkeypatch, after):
    full_disk(monkeypatch, after)
    with pytest.raises(OutputError) as caught:
        convert(MODEL, place / "out", threads=2, max_shard_bytes=40_000)
    assert "No space left on device" in str(caught.value)
    assert str(place / "out") in str(caught.value)
    assert left_in(place) == []


def test_a_disk_that_is_too_small(place, monkeypatch):
    usage = shutil.disk_usage(place)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(OutputError, match=r"needs \d.*GB but .* has 0.00 GB free"):
        convert(MODEL, place / "a" / "out")
    assert left_in(place) == []


def test_pieces_that_are_written_in_part(place, monkeypatch):
    """The system may write less than it is given."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:777], offset))
    convert(MODEL, place / "slow")
    monkeypatch.undo()
    convert(MODEL, place / "fast")
    slow, fast = (place / name / "model.safetensors" for name in ("slow", "fast"))
    assert slow.read_bytes() == fast.read_bytes()


INTERRUPTED = """
import os, sys, time
import gguf2st.run
write = gguf2st.run._Work._write
def slow(*arguments):
    os.write(1, b"writing\\n")  # print would mix up the lines of two threads
    time.sleep(1)
    return write(*arguments)
gguf2st.run._Work._write = slow
from gguf2st.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_signals(place, number):
    command = [sys.executable, "-c", INTERRUPTED, "convert", str(MODEL), "-o", str(place / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=FIXTURES.parent
    )
    assert process.stdout.readline() == "writing\n"
    assert left_in(place)
    process.send_signal(number)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 20
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert left_in(place) == []


# --- what is there already --------------------------------------------------------------------


@pytest.fixture
def checkpoint(place):
    convert(MODEL, place / "out", to="f32")
    return place / "out"


def test_an_existing_directory_is_not_touched(place, checkpoint):
    before = contents(checkpoint), checkpoint.stat().st_ino
    with pytest.raises(OutputError, match=r"exists already.*--force"):
        convert(MODEL, checkpoint)
    assert (contents(checkpoint), checkpoint.stat().st_ino) == before
    assert left_in(place)[0] == "out"


def test_force_replaces_a_checkpoint(place, checkpoint):
    before = contents(checkpoint)
    (checkpoint / "stale.txt").write_text("old")
    convert(MODEL, checkpoint, force=True)
    assert contents(checkpoint).keys() == before.keys()
    assert contents(checkpoint)["model.safetensors"] != before["model.safetensors"]
    assert [path.name for path in place.iterdir()] == ["out"]


def test_force_fills_an_empty_directory(place):
    (place / "out").mkdir()
    convert(MODEL, place / "out", force=True)
    assert (place / "out" / "config.json").exists()


@pytest.mark.parametrize("error", [OwnError, KeyboardInterrupt])
def test_a_failure_keeps_the_checkpoint_to_be_replaced(place, checkpoint, error):
    before = contents(checkpoint)

    def progress(_progress):
        raise error

    with pytest.raises(error):
        convert(MODEL, checkpoint, force=True, progress=progress)
    assert contents(checkpoint) == before
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()])
def test_a_failure_at_the_last_step_keeps_it_too(place, checkpoint, monkeypatch, error):
    before, rename = contents(checkpoint), Path.rename

    def failing(path, target):
        if ".partial-" in path.name:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        convert(MODEL, checkpoint, force=True)
    assert contents(checkpoint) == before
    assert [path.name for path in place.iterdir()] == ["out"]


def photographs(path):
    path.mkdir()
    (path / "holiday.jpg").write_bytes(b"dear")


def project(path):
    photographs(path)
    (path / "config.json").write_text("{}")


def other_weights(path):
    photographs(path)
    (path / "model.safetensors").write_bytes(b"")


def plain_file(path):
    path.write_text("text")


def link(path):
    convert(MODEL, path.with_name("linked"))
    path.symlink_to("linked")


def broken_link(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    "make", [photographs, project, other_weights, plain_file, link, broken_link]
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_force_replaces_nothing_else(place, make, dry_run):
    make(place / "out")
    before = left_in(place), contents(place)
    with pytest.raises(OutputError, match="isn't a checkpoint directory"):
        convert(MODEL, place / "out", force=True, dry_run=dry_run)
    assert (left_in(place), contents(place)) == before


def test_a_directory_that_appears_in_the_meantime(place):
    def progress(_progress):
        if not (place / "out").exists():
            photographs(place / "out")

    with pytest.raises(OutputError, match="exists already"):
        convert(MODEL, place / "out", progress=progress)
    assert left_in(place) == ["out", "out/holiday.jpg"]


def test_two_conversions_of_one_process_to_the_same_place(place):
    """The later one fails; it leaves the other one's partial directory alone."""
    with appearing_directory(place / "out", force=False, needed_bytes=0) as partial:
        (partial / "a").write_text("first")
        with (
            pytest.raises(OutputError),
            appearing_directory(place / "out", force=False, needed_bytes=0),
        ):
            pass
    assert (place / "out" / "a").read_text() == "first"


@pytest.mark.parametrize("name", ["file/out", "n" * 300, "file"])
def test_places_where_nothing_can_be_written(place, name):
    (place / "file").write_text("text")
    with pytest.raises(OutputError) as caught:
        convert(MODEL, place / name)
    assert str(place / name) in str(caught.value)
    assert left_in(place) == ["file"]


def test_a_dry_run_writes_nothing(place):
    report = convert(MODEL, place / "new" / "out", dry_run=True)
    assert left_in(place) == []
    convert(MODEL, place / "out")
    assert report.total_bytes == sum(path.stat().st_size for path in (place / "out").rglob("*"))
    assert np.isclose(report.peak_memory, 250_000_000, rtol=0.6)
