"""What the command line says of bad input: one sentence, the right exit code, nothing left behind."""

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf2st.cli.parsing import parse_size
from gguf2st.errors import UsageError
from tests.command_line import run
from tests.gguf.files import craft, entry, text_key, write_gguf

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "fixtures"
LLAMA = FIXTURES / "llama-small" / "llama-small-bf16.gguf"
QWEN = FIXTURES / "qwen35-small" / "qwen35-small-bf16.gguf"
MMPROJ = FIXTURES / "qwen35-small" / "mmproj-qwen35-small-f16.gguf"
WIDE_MMPROJ = FIXTURES / "qwen35" / "mmproj-qwen35-f16.gguf"

FAILED, USAGE, INPUT, UNSUPPORTED, OUTPUT = 1, 2, 3, 4, 5


@pytest.fixture
def refuse(tmp_path):
    """Run `convert`, which must refuse in one line; returns that line."""
    place = tmp_path / "place"
    place.mkdir()

    def refused(code, *arguments, output=place / "new" / "out"):
        before = sorted(place.rglob("*"))
        found = run("convert", *arguments, "-o", output)
        assert found.returncode == code, found.stderr
        assert found.stdout == ""
        assert found.stderr.count("\n") == 1, found.stderr
        assert found.stderr.startswith("gguf2st: ")
        assert found.stderr.endswith(".\n")
        assert sorted(place.rglob("*")) == before
        return found.stderr

    refused.place = place
    return refused


@pytest.fixture
def broken(tmp_path):
    """Write a file that isn't sound."""

    def write(raw, name="broken.gguf"):
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


def changed(path, old, new):
    """The bytes of a file with one piece replaced by another as long."""
    raw = path.read_bytes()
    assert raw.count(old) == 1
    assert len(old) == len(new)
    return raw.replace(old, new)


# --- files that aren't GGUF, or are damaged ---------------------------------------------------


@pytest.mark.parametrize("missing", [1, 60_000])
def test_a_truncated_file(refuse, broken, missing):
    raw = LLAMA.read_bytes()
    path = broken(raw[:-missing])
    tensors = [(t.name, t.data_offset, int(t.n_bytes)) for t in gguf.GGUFReader(LLAMA).tensors]
    size = len(raw) - missing
    cut = [(name, start, nbytes) for name, start, nbytes in tensors if start + nbytes > size]
    message = refuse(INPUT, path)
    assert f"{path} is cut short: tensor {cut[0][0]} ends at byte" in message
    lost = sum(start + nbytes - max(start, size) for _, start, nbytes in cut)
    assert f"({lost:,} bytes of tensors are missing)" in message
    assert "download is incomplete" in message


def test_a_file_that_ends_in_its_header(refuse, broken):
    message = refuse(INPUT, broken(LLAMA.read_bytes()[:2000]))
    assert "fetch" in message


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4661211808\n"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty (0 bytes); fetch it again"),
        (LFS, "a Git LFS pointer, not the model itself; fetch the real file"),
        (b"<!doctype html><html><title>Entry not found</title>", "a web page, not a model"),
        (b"GGML" + bytes(100), "not a GGUF file (it starts with b'GGML', not b'GGUF')"),
        (struct.pack("<Q", 40) + b'{"a":{}}' + bytes(40), "a safetensors file already"),
    ],
    ids=["empty", "LFS pointer", "page", "wrong magic", "safetensors"],
)
def test_other_files_called_gguf(refuse, broken, raw, words):
    path = broken(raw)
    assert f"{path} is {words}" in refuse(INPUT, path)


def test_a_missing_file(refuse, tmp_path):
    path = tmp_path / "none.gguf"
    assert f"{path} can't be opened (No such file or directory)" in refuse(INPUT, path)


def test_a_directory(refuse, tmp_path):
    assert "is a directory; give the GGUF file in it" in refuse(USAGE, tmp_path)


def test_a_missing_shard(refuse, tmp_path):
    tensors = {f"t{number}": np.zeros(4, np.float32) for number in range(4)}
    write_gguf(tmp_path / "m.gguf", {}, tensors, split_max_tensors=2)
    missing = tmp_path / "m-00002-of-00002.gguf"
    missing.unlink()
    message = refuse(INPUT, tmp_path / "m-00001-of-00002.gguf")
    assert f"shard 2 of 2 is missing: {missing}" in message


# --- sound files that aren't supported --------------------------------------------------------


def test_an_unknown_architecture(refuse, broken):
    name = b"general.architecture" + struct.pack("<IQ", 8, 5)
    message = refuse(UNSUPPORTED, broken(changed(LLAMA, name + b"llama", name + b"llamb")))
    for words in ("architecture 'llamb'", "nearest: llama", "gguf2st archs", "CONTRIBUTING.md"):
        assert words in message


def test_a_tensor_that_no_table_knows(refuse, broken):
    path = broken(changed(LLAMA, b"blk.1.ffn_up.weight", b"blk.1.ffn_op.weight"))
    message = refuse(UNSUPPORTED, path)
    for words in ("tensor blk.1.ffn_op.weight", "in no entry of llama.toml", "CONTRIBUTING.md"):
        assert words in message


def test_an_unknown_block_type(refuse, broken):
    raw = craft(
        [text_key("general.architecture", "llama")], [entry("blk.0.w", [256], 139)], bytes(4096)
    )
    message = refuse(UNSUPPORTED, broken(raw))
    assert "tensor blk.0.w: Block type 139 is IQ4_K of the fork ik_llama.cpp" in message


def test_version_1(refuse, broken):
    assert "GGUF version 1" in refuse(UNSUPPORTED, broken(craft(version=1)))


# --- files in the wrong place -----------------------------------------------------------------


def test_an_mmproj_as_the_model(refuse):
    message = refuse(USAGE, MMPROJ)
    assert "vision projector (mmproj); give the language model as the model" in message
    assert "with --mmproj" in message


def test_an_mmproj_of_another_model(refuse):
    message = refuse(USAGE, QWEN, "--mmproj", WIDE_MMPROJ)
    width = gguf.GGUFReader(QWEN).fields["qwen35.embedding_length"].contents()
    assert f"{WIDE_MMPROJ} projects to 256 channels but {QWEN} is {width} wide" in message


def test_an_mmproj_for_a_model_without_vision(refuse):
    message = refuse(UNSUPPORTED, LLAMA, "--mmproj", MMPROJ)
    assert str(MMPROJ) in message
    assert "'qwen3vl_merger'" in message


def test_a_model_as_the_mmproj(refuse):
    assert "a language model; give it as the model" in refuse(USAGE, QWEN, "--mmproj", QWEN)


def test_a_lora_adapter(refuse, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"general.type": "adapter"}, {"w": np.zeros(4)})
    assert "a LoRA adapter; merge it" in refuse(UNSUPPORTED, path)


# --- models that contradict themselves --------------------------------------------------------


@pytest.mark.parametrize("name", ["llama.block_count", "llama.context_length"])
def test_a_missing_key(refuse, broken, name):
    path = broken(changed(LLAMA, name.encode(), name.encode()[:-1] + b"_"))
    message = refuse(INPUT, path)
    assert name in message
    assert str(path) in message


def test_a_missing_tensor(refuse, tmp_path):
    file = gguf.GGUFReader(LLAMA)
    keys = {name: field.contents() for name, field in file.fields.items() if "llama." in name}
    tensors = {
        t.name: (t.data, t.tensor_type) for t in file.tensors if t.name != "blk.1.attn_k.weight"
    }
    path = write_gguf(tmp_path / "a.gguf", keys, tensors)
    message = refuse(INPUT, path)
    assert f"{path} lacks tensor blk.1.attn_k.weight" in message


def patch_tensor(path, name, values):
    """The bytes of a file with the first values of a tensor replaced."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    raw = bytearray(path.read_bytes())
    data = values.tobytes()
    raw[tensor.data_offset : tensor.data_offset + len(data)] = data
    return bytes(raw)


def test_values_that_can_not_be(refuse, broken):
    """It shows when the tensor is written, so a partial output must be cleared away."""
    path = broken(patch_tensor(QWEN, "blk.0.ssm_a", np.float32([0.5])))
    message = refuse(INPUT, path)
    assert f"tensor blk.0.ssm_a of {path}" in message
    assert "below zero" in message


def test_values_beyond_float16(refuse, broken):
    path = broken(patch_tensor(LLAMA, "blk.1.ffn_up.weight", np.uint16([0x7F00])))
    message = refuse(UNSUPPORTED, path, "--to", "f16")
    assert "beyond float16's 65504; use --to bf16" in message


# --- requests that can't be met ---------------------------------------------------------------


def test_an_unknown_format(refuse):
    message = refuse(USAGE, LLAMA, "--to", "int3")
    assert "no output format 'int3'; there are bf16, f16, f32" in message


def test_a_bad_shard_size(refuse):
    message = refuse(USAGE, LLAMA, "--max-shard-size", "5 apples")
    assert "'5 apples' isn't a size; write for example 5GB" in message


@pytest.mark.parametrize("size", ["", "-1GB", "0", "1e9", "GB", "0.1B", "5GBs", "5 5", "inf"])
def test_bad_sizes(size):
    with pytest.raises(UsageError, match="isn't a size"):
        parse_size(size)


@pytest.mark.parametrize(
    ("size", "number"),
    [("1", 1), ("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2GiB", 2**31), (" 500MB ", 5 * 10**8)],
)
def test_sizes(size, number):
    assert parse_size(size) == number


def test_an_existing_output(refuse):
    output = refuse.place / "out"
    output.mkdir()
    (output / "precious.txt").write_text("text")
    assert f"{output} exists already" in refuse(OUTPUT, LLAMA, output=output)
    message = refuse(OUTPUT, LLAMA, "--force", output=output)
    assert "isn't a checkpoint directory" in message
    assert (output / "precious.txt").read_text() == "text"


@pytest.mark.parametrize("name", ["file/out", "n" * 300])
def test_an_output_that_can_not_be_made(refuse, name):
    (refuse.place / "file").write_text("text")
    assert str(refuse.place / name) in refuse(OUTPUT, LLAMA, output=refuse.place / name)


def test_a_full_disk(refuse):
    """A limit on the size of files stands for it."""
    place = refuse.place / "out"
    command = f'ulimit -f 30; exec "{sys.executable}" -m gguf2st.cli convert "{LLAMA}" -o "{place}"'
    found = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.returncode == OUTPUT
    assert f"{place} can't be written (File too large)" in found.stderr
    assert found.stderr.count("\n") == 1
    assert not list(refuse.place.iterdir())


def test_mapping_tables_of_ones_own(refuse, tmp_path):
    none = tmp_path / "none"
    assert "isn't a directory of mapping tables" in refuse(USAGE, LLAMA, "--mappings", none)
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "mine.toml").write_text("schema = 1\n[variables]\na = '1 +'\nb = 'x.y'\n")
    message = refuse(USAGE, LLAMA, "--mappings", tables)
    assert "mine.toml has 2 problem(s): variables.a" in message
    assert "variables.b" in message


@pytest.mark.parametrize("option", ["--tokenizer-from", "--config-from"])
def test_a_missing_original(refuse, tmp_path, option):
    message = refuse(USAGE, LLAMA, option, tmp_path / "none")
    assert str(tmp_path / "none") in message


@pytest.mark.parametrize("arguments", [["convert"], ["convert", "a.gguf", "--colour"], ["covert"]])
def test_usage(arguments):
    """Typer answers these itself."""
    found = run(*arguments)
    assert found.returncode == USAGE
    assert "Traceback" not in found.stderr
    assert found.stderr


def test_inspecting_bad_input(broken):
    found = run("inspect", broken(LFS))
    assert (found.returncode, found.stdout) == (INPUT, "")
    assert "a Git LFS pointer" in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_name_that_is_no_text(tmp_path):
    """Names of a file may hold any bytes: they must neither stop the report nor steer the terminal."""
    name = ("bad \udcff\x1b[2J\nname".encode("utf-8", "surrogateescape"), gguf.GGUFValueType.STRING)
    path = write_gguf(tmp_path / "a.gguf", {"general.name": name}, {"w": np.zeros(4)})
    found = run("inspect", path)
    assert (found.returncode, found.stderr) == (0, "")
    line = next(line for line in found.stdout.splitlines() if line.startswith("name "))
    assert line.isprintable()
    assert line.endswith("name")
