"""Opening one file: what gguf-py's reader sees, and what is said of damaged files."""

import contextlib
import gc
import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf2st.errors import Gguf2stError, InputError, UnsupportedError
from gguf2st.gguf import GgufFile
from tests.gguf.files import (
    BF16,
    F32,
    Q4_K,
    array_key,
    craft,
    entry,
    key,
    number_key,
    string,
    text_key,
    write_gguf,
)

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures").glob("*/*.gguf"))

SCALARS = {
    "a.u8": (200, GGUFValueType.UINT8),
    "a.i8": (-100, GGUFValueType.INT8),
    "a.u16": (60_000, GGUFValueType.UINT16),
    "a.i16": (-30_000, GGUFValueType.INT16),
    "a.u32": (4_000_000_000, GGUFValueType.UINT32),
    "a.i32": (-2_000_000_000, GGUFValueType.INT32),
    "a.u64": (2**63 + 5, GGUFValueType.UINT64),
    "a.i64": (-(2**62), GGUFValueType.INT64),
    "a.f32": (0.1, GGUFValueType.FLOAT32),
    "a.f64": (0.1, GGUFValueType.FLOAT64),
    "a.yes": (True, GGUFValueType.BOOL),
    "a.no": (False, GGUFValueType.BOOL),
    "a.text": ("zwölf Boxkämpfer 🥊", GGUFValueType.STRING),
    "a.raw": (b"\xff\xfe caf\xe9", GGUFValueType.STRING),
}
ARRAYS = {
    "b.u8": ([0, 255], GGUFValueType.UINT8),
    "b.i8": ([-128, 127], GGUFValueType.INT8),
    "b.u16": ([0, 65_535], GGUFValueType.UINT16),
    "b.i16": ([-32_768, 32_767], GGUFValueType.INT16),
    "b.u32": ([0, 2**32 - 1], GGUFValueType.UINT32),
    "b.i32": ([-(2**31), 2**31 - 1], GGUFValueType.INT32),
    "b.u64": ([0, 2**64 - 1], GGUFValueType.UINT64),
    "b.i64": ([-(2**63), 2**63 - 1], GGUFValueType.INT64),
    "b.f32": ([0.1, -1e30], GGUFValueType.FLOAT32),
    "b.f64": ([0.1, -1e300], GGUFValueType.FLOAT64),
    "b.bool": ([True, False, True], GGUFValueType.BOOL),
    "b.text": (["a", "", "ßü", "▁the"], GGUFValueType.STRING),
    "b.raw": ([b"ok", b"\x80\xff", b""], GGUFValueType.STRING),
}
KEYS = SCALARS | {
    name: (items, GGUFValueType.ARRAY, kind) for name, (items, kind) in ARRAYS.items()
}


def some_tensors():
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (2, 3, 144), np.uint8)
    return {
        "one.weight": random.random(7, np.float32),
        "two.weight": random.random((3, 5)).astype(np.float16),
        "three.weight": random.random((2, 3, 4)),
        "four.weight": random.integers(-9, 9, (2, 1, 3, 4), np.int32),
        "trailing.weight": random.random((5, 1, 1), np.float32),
        "packed.weight": (raw, GGMLQuantizationType.Q4_K),
        "half.weight": (random.integers(0, 256, (4, 12), np.uint8), GGMLQuantizationType.BF16),
    }


def stored_value(field):
    """Value of a gguf-py field, with strings as raw bytes."""
    if field.types[0] is GGUFValueType.STRING:
        return field.parts[-1].tobytes()
    if field.types[0] is not GGUFValueType.ARRAY:
        return field.parts[-1].tolist()[0]
    parts = [field.parts[index] for index in field.data]
    if field.types[-1] is GGUFValueType.STRING:
        return [part.tobytes() for part in parts]
    return [part.tolist()[0] for part in parts]


def found_value(value):
    """Value of ours in the same form."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, np.ndarray):
        assert value.dtype.isnative
        return value.tolist()
    return [found_value(item) for item in value] if isinstance(value, list) else value


def assert_as_gguf_py_sees_it(path):
    found, expected = GgufFile(path), gguf.GGUFReader(path)
    fields = {name: f for name, f in expected.fields.items() if not name.startswith("GGUF.")}
    assert list(found.metadata) == list(fields)
    for name, field in fields.items():
        assert found_value(found.metadata[name]) == stored_value(field), name
        count = len(field.data) if field.types[0] is GGUFValueType.ARRAY else None
        assert found.metadata.length(name) == count
    assert list(found.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        ours = found.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.kind.name == tensor.tensor_type.name
        assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.elements == tensor.n_elements
        rows = ours.read_rows(0, ours.row_count)
        assert rows.shape == (ours.row_count, ours.row_bytes)
        assert rows.tobytes() == tensor.data.tobytes()
    return found


@pytest.mark.parametrize("alignment", [8, 32, 4096])
@pytest.mark.parametrize("endian", list(GGUFEndian))
def test_everything_is_as_gguf_py_reads_it(tmp_path, alignment, endian):
    path = write_gguf(
        tmp_path / "a.gguf", KEYS, some_tensors(), alignment=alignment, endianess=endian
    )
    found = assert_as_gguf_py_sees_it(path)
    assert found.version == 3
    assert found.big_endian == (endian is GGUFEndian.BIG)
    assert all(tensor.offset % alignment == 0 for tensor in found.tensors.values())


def test_version_2(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", KEYS, some_tensors())
    raw = bytearray(path.read_bytes())
    raw[4] = 2
    path.write_bytes(raw)
    assert assert_as_gguf_py_sees_it(path).version == 2


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_fixtures(path):
    try:
        assert_as_gguf_py_sees_it(path)
    except ValueError as error:  # the gguf-py on PyPI may not know a new block type yet
        if "GGMLQuantizationType" not in str(error):
            raise
        pytest.skip(str(error))


def test_values_of_a_big_endian_file(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": values}, endianess=GGUFEndian.BIG)
    assert (
        GgufFile(path).tensors["w"].read_rows(1, 2).tobytes() == values[1].astype(">f4").tobytes()
    )


def test_some_rows(tmp_path):
    values = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    tensor = GgufFile(write_gguf(tmp_path / "a.gguf", {}, {"w": values})).tensors["w"]
    assert (tensor.columns, tensor.row_count, tensor.row_bytes) == (5, 12, 20)
    rows = tensor.read_rows(3, 9).view(np.float32)
    np.testing.assert_array_equal(rows, values.reshape(12, 5)[3:9])


def test_tensors_may_lie_in_any_order(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(
        craft(tensors=[entry("b", [2], F32, 32), entry("a", [2], F32, 0)], data=bytes(range(40)))
    )
    found = GgufFile(path).tensors
    assert found["a"].read_rows(0, 1).tobytes() == bytes(range(8))
    assert found["b"].read_rows(0, 1).tobytes() == bytes(range(32, 40))


def test_a_file_without_tensors_and_keys(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(craft())
    assert (dict(GgufFile(path).metadata), GgufFile(path).tensors) == ({}, {})


@pytest.mark.parametrize("item_type", [4, 8])
def test_an_empty_array(tmp_path, item_type):
    path = tmp_path / "a.gguf"
    path.write_bytes(craft([array_key("a.b", item_type, 0, b""), number_key("a.c", 7)]))
    metadata = GgufFile(path).metadata
    assert (list(metadata["a.b"]), metadata.length("a.b"), metadata["a.c"]) == ([], 0, 7)


def test_arrays_stay_packed_until_asked_for(tmp_path):
    count = 100_000
    items = b"".join(string(f"token{number}") for number in range(count))
    path = tmp_path / "a.gguf"
    path.write_bytes(
        craft([array_key("tokens", 8, count, items), text_key("template", "x" * count)])
    )
    tracemalloc.start()
    try:
        file = GgufFile(path)
        assert file.metadata.length("tokens") == count
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    assert file.metadata["tokens"][-1] == "token99999"


def test_many_files_leave_no_descriptor_open(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", KEYS, some_tensors())
    bad = tmp_path / "b.gguf"
    bad.write_bytes(path.read_bytes()[:200])
    gc.collect()  # tensors and their file refer to each other
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(20):
        GgufFile(path)
        with contextlib.suppress(InputError):
            GgufFile(bad)
    gc.collect()
    assert len(list(Path("/dev/fd").iterdir())) == before


# --- damage -----------------------------------------------------------------------------------


def small_file():
    """Every kind of field once; 3 tensors of 64, 32 and 144 bytes."""
    keys = [
        text_key("general.architecture", "llama"),
        number_key("general.alignment", 32),
        key("some.float", 6, struct.pack("<f", 1.5)),
        array_key("some.tokens", 8, 2, string("a") + string("bc")),
        array_key("some.scores", 6, 3, struct.pack("<3f", 1, 2, 3)),
    ]
    tensors = [
        entry("first.weight", [4, 4], F32, 0),
        entry("second.weight", [4, 2, 2], BF16, 64),
        entry("third.weight", [256], Q4_K, 96),
    ]
    return craft(keys, tensors, bytes(240))


def refusal(tmp_path, raw, error=InputError):
    """Message with which a file of these bytes is refused."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(raw)
    with pytest.raises(error) as caught:
        GgufFile(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_the_small_file_is_sound(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(small_file())
    assert len(assert_as_gguf_py_sees_it(path).tensors) == 3


def test_cut_at_every_byte_of_the_header(tmp_path):
    raw = small_file()
    header = len(raw) - 240
    for cut in range(header):
        message = refusal(tmp_path, raw[:cut])
        words = ("empty", "not a GGUF file", "incomplete", "fetch", "cut short")
        assert any(word in message for word in words), (cut, message)


def test_cut_at_every_byte_of_the_data(tmp_path):
    raw = small_file()
    start = len(raw) - 240
    extents = {"first.weight": (0, 64), "second.weight": (64, 96), "third.weight": (96, 240)}
    for cut in range(240):
        message = refusal(tmp_path, raw[: start + cut])
        first = next(name for name, (_, end) in extents.items() if end > cut)
        missing = sum(end - max(cut, begin) for begin, end in extents.values() if end > cut)
        assert f"tensor {first} ends" in message
        assert f"{missing} bytes of tensors are missing" in message
        assert "download is incomplete" in message


@pytest.mark.parametrize(
    ("width", "byte"), [(1, 0x01), (1, 0xFF), (4, 0x80), (8, 0x00), (8, 0x7F), (8, 0xFF)]
)
def test_every_field_overwritten(tmp_path, width, byte):
    """A file with one number changed opens or is refused; nothing else happens."""
    raw = small_file()
    path = tmp_path / "broken.gguf"
    refused = 0
    for position in range(len(raw) - 240 - width):
        changed = bytearray(raw)
        changed[position : position + width] = bytes([byte]) * width
        path.write_bytes(changed)
        try:
            use_everything(GgufFile(path))
        except (InputError, UnsupportedError) as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 20


def use_everything(file):
    for name in file.metadata:
        _ = file.metadata[name]
    for tensor in file.tensors.values():
        assert tensor.read_rows(0, tensor.row_count).nbytes == tensor.nbytes


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 700)),
)
def test_random_damage(tmp_path, changes, cut):
    raw = bytearray(small_file())
    for position, byte in changes:
        raw[position % len(raw)] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw[:cut])
    started = time.process_time()
    tracemalloc.start()
    try:
        with contextlib.suppress(Gguf2stError):
            use_everything(GgufFile(path))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 1


HUGE = 2**64 - 1
DAMAGE = {
    "more keys than fit": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40) + bytes(100),
        ["damaged at byte 8", "1,099,511,627,776 keys", "more than fit"],
    ),
    "more tensors than fit": (
        b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0) + bytes(100),
        ["damaged at byte 8", "tensors", "more than fit"],
    ),
    "a key's name is longer than the file": (
        craft([struct.pack("<Q", HUGE) + bytes(60)]),
        ["damaged at byte 24", "a string of 18,446,744,073,709,551,615 bytes", "past the end"],
    ),
    "a value is longer than the file": (
        craft([key("a.text", 8, struct.pack("<Q", 2**50) + b"abc")]),
        ["a string of 1,125,899,906,842,624 bytes", "past the end"],
    ),
    "the same key twice": (
        craft([number_key("a.b", 1), number_key("a.b", 2)]),
        ["'a.b'", "there twice"],
    ),
    "an empty key": (craft([number_key("", 1)]), ["name of a key has 0 bytes", "1 to 65,535"]),
    "an array of arrays": (
        craft([array_key("a.b", 9, 1, struct.pack("<IQ", 4, 0))]),
        ["'a.b'", "nested arrays"],
    ),
    "an unknown value type": (
        craft([key("a.b", 13, bytes(8))]),
        ["'a.b'", "the unknown value type 13"],
    ),
    "an unknown item type": (
        craft([array_key("a.b", 77, 1, bytes(8))]),
        ["'a.b'", "the unknown item type 77"],
    ),
    "an array of more numbers than fit": (
        craft([array_key("a.b", 4, HUGE, bytes(64))]),
        ["'a.b'", "18,446,744,073,709,551,615 items"],
    ),
    "an array of more strings than fit": (
        craft([array_key("a.b", 8, 2**60, bytes(64))]),
        ["'a.b'", "1,152,921,504,606,846,976 strings"],
    ),
    "a string of an array is too long": (
        craft([array_key("a.b", 8, 2, string("a") + struct.pack("<Q", 2**33) + bytes(8))]),
        ["a string of the array 'a.b'", "past the end"],
    ),
    "an alignment that isn't a power of two": (
        craft([number_key("general.alignment", 24)]),
        ["general.alignment is 24", "power of two"],
    ),
    "an alignment of nought": (
        craft([number_key("general.alignment", 0)]),
        ["general.alignment is 0", "power of two"],
    ),
    "an alignment that isn't a number": (
        craft([text_key("general.alignment", "32")]),
        ["general.alignment is '32'", "power of two"],
    ),
    "the same tensor twice": (
        craft(tensors=[entry("a", [4]), entry("a", [4], F32, 32)], data=bytes(64)),
        ["the tensor 'a' is there twice"],
    ),
    "a tensor without a name": (
        craft(tensors=[entry("", [4])], data=bytes(64)),
        ["name of a tensor has 0 bytes", "1 to 63"],
    ),
    "a tensor's name is too long": (
        craft(tensors=[entry("n" * 64, [4])], data=bytes(64)),
        ["name of a tensor has 64 bytes", "1 to 63"],
    ),
    "a tensor's name that steers the terminal": (
        craft(tensors=[entry("a\x1b[2J\nb", [4])], data=bytes(64)),
        [r"the name 'a\x1b[2J\nb' of a tensor isn't printable"],
    ),
    "a key's name that isn't text": (
        craft([number_key(b"a.\xff", 1)]),
        [r"the name 'a.\udcff' of a key isn't printable"],
    ),
    "too many axes": (
        craft(tensors=[entry("a", [1, 1, 1, 1, 4])], data=bytes(64)),
        ["tensor a has 5 axes", "4 are the most"],
    ),
    "an axis of no extent": (
        craft(tensors=[entry("a", [4, 0])], data=bytes(64)),
        ["tensor a has the impossible shape (4, 0)"],
    ),
    "a negative axis": (
        craft(tensors=[entry("a", [2**64 - 4])], data=bytes(64)),
        ["tensor a has the impossible shape (18446744073709551612,)"],
    ),
    "more elements than 64 bits count": (
        craft(tensors=[entry("a", [2**32, 2**32])], data=bytes(64)),
        ["tensor a has the impossible shape"],
    ),
    "rows of half a block": (
        craft(tensors=[entry("a", [128], Q4_K)], data=bytes(144)),
        ["rows of tensor a have 128 elements", "Q4_K blocks of 256"],
    ),
    "an unaligned tensor": (
        craft(tensors=[entry("a", [4], F32, 16)], data=bytes(64)),
        ["tensor a lies at offset 16", "a multiple of 32"],
    ),
    "tensors that overlap": (
        craft(tensors=[entry("a", [16]), entry("b", [4], F32, 32)], data=bytes(96)),
        ["the tensors a and b overlap"],
    ),
    "a tensor far outside": (
        craft(tensors=[entry("a", [4], F32, 2**63)], data=bytes(64)),
        ["tensor a"],
    ),
}


@pytest.mark.parametrize(("raw", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_what_is_said_of_damage(tmp_path, raw, words):
    message = refusal(tmp_path, raw)
    for word in [*words, "fetch"]:
        assert word in message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (4, "Q4_2, which was removed"),
        (33, "Q4_0_8_8, which was removed"),
        (36, "bitnet.cpp"),
        (9, "Q8_1, which ggml uses in memory only"),
        (99, "Block type 99 is unknown"),
        (139, "IQ4_K of the fork ik_llama.cpp"),
        (2**32 - 1, "unknown"),
    ],
)
def test_block_types_without_a_decoder(tmp_path, code, words):
    raw = craft(tensors=[entry("blk.0.w", [256], code)], data=bytes(4096))
    message = refusal(tmp_path, raw, UnsupportedError)
    assert "tensor blk.0.w" in message
    assert words in message


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "convert the model again"), (0, "version 0"), (4, "newer gguf2st"), (2**31, "version")],
)
def test_other_versions(tmp_path, version, words):
    message = refusal(tmp_path, craft(version=version), UnsupportedError)
    assert "versions 2 and 3 are supported" in message
    assert words in message


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4661211808\n"
OTHER_FILES = {
    "empty": (b"", "is empty (0 bytes)"),
    "LFS pointer": (LFS, "a Git LFS pointer"),
    "page": (b"<!DOCTYPE html>\n<html><head>", "a web page"),
    "indented page": (b"\r\n  <HTML lang='en'>", "a web page"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip archive or a PyTorch checkpoint"),
    "safetensors": (safetensors.numpy.save({"a": np.zeros(3)}), "a safetensors file already"),
    "GGML": (b"lmgg" + bytes(60), "the GGML format that came before"),
    "GGMF": (b"fmgg" + bytes(60), "the GGMF format that came before"),
    "GGJT": (b"tjgg" + bytes(60), "the GGJT format that came before"),
    "second part of a cut file": (b"\x00\x01\x02\x03" * 20, "join the parts with `cat`"),
    "reversed magic": (b"FUGG" + bytes(60), "starts with b'FUGG', not b'GGUF'"),
    "part of the magic": (b"GGU", "not a GGUF file"),
}


@pytest.mark.parametrize(("raw", "words"), OTHER_FILES.values(), ids=OTHER_FILES.keys())
def test_other_kinds_of_files(tmp_path, raw, words):
    assert words in refusal(tmp_path, raw)


@contextlib.contextmanager
def ordinary_user():
    """Without the rights of root, which may open everything."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def test_paths_that_can_not_be_opened(tmp_path):
    secret = tmp_path / "secret.gguf"
    secret.write_bytes(small_file())
    secret.chmod(0)
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    paths = {
        tmp_path / "none.gguf": "No such file",
        tmp_path: "Is a directory",
        tmp_path / ("n" * 300): "too long",
        secret: "Permission denied",
        fifo: "isn't a regular file",
    }
    for path, words in paths.items():
        with (
            ordinary_user() if path == secret else contextlib.nullcontext(),
            pytest.raises(InputError) as caught,
        ):
            GgufFile(path)
        assert str(path) in str(caught.value)
        assert words in str(caught.value)


def test_an_endless_string_is_not_fetched(tmp_path):
    """A sparse file of many gigabytes takes no room on the disk and must take none in memory."""
    path = tmp_path / "sparse.gguf"
    for raw in (
        craft([struct.pack("<Q", 2**33) + b"name"]),
        craft([key("a.text", 8, struct.pack("<Q", 2**33))]),
        craft(tensors=[struct.pack("<Q", 2**33) + b"name"]),
    ):
        path.write_bytes(raw)
        os.truncate(path, 2**34)
        tracemalloc.start()
        try:
            with contextlib.suppress(InputError):
                GgufFile(path)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": np.zeros((64, 1024), np.float32)})
    tensor = GgufFile(path).tensors["w"]
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(InputError, match="became shorter while it was read"):
        tensor.read_rows(0, 64)
