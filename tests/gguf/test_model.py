"""Several files as one model: shards, projectors, separate MTP blocks, and files of other kinds."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf2st.errors import InputError, UnsupportedError, UsageError
from gguf2st.gguf import open_model, open_source
from tests.gguf.files import write_gguf

FIXTURES = Path(__file__).parents[2] / "fixtures"
TENSORS = {
    f"blk.{layer}.{leaf}.weight": np.full((2, 4), 10 * layer + number, np.float32)
    for layer in range(3)
    for number, leaf in enumerate(("attn_norm", "ffn_up", "ffn_down"))
}
KEYS = {"llama.block_count": 3, "llama.embedding_length": 4}


def language(path, keys=None, tensors=None, **options):
    return write_gguf(path, KEYS | (keys or {}), TENSORS if tensors is None else tensors, **options)


# --- split files ------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    """Three shards of three tensors each."""
    language(tmp_path / "model.gguf", split_max_tensors=3)
    return sorted(tmp_path.glob("model-0000?-of-00003.gguf"))


@pytest.mark.parametrize("given", range(3))
def test_any_shard_opens_the_whole_set(shards, given):
    source = open_source(shards[given])
    assert [file.path for file in source.files] == shards
    assert list(source.tensors) == list(TENSORS)
    assert source.architecture == "llama"
    assert source.size == sum(path.stat().st_size for path in shards)
    for name, values in TENSORS.items():
        tensor = source.tensors[name]
        np.testing.assert_array_equal(tensor.read_rows(0, 2).view(np.float32), values)


def test_shards_of_the_fixtures():
    """Sets that llama-gguf-split made."""
    first = sorted(FIXTURES.glob("*/*-00001-of-*.gguf"))
    if not first:
        pytest.skip("no split fixture")
    for path in first:
        source = open_source(path)
        expected = [t.name for file in source.files for t in gguf.GGUFReader(file.path).tensors]
        assert list(source.tensors) == expected
        assert open_model(path).architecture == source.architecture


def test_a_first_shard_of_keys_only(tmp_path):
    language(tmp_path / "model.gguf", split_max_tensors=5, small_first_shard=True)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    assert len(others) == 2
    assert not gguf.GGUFReader(first).tensors
    for path in (first, *others):
        assert open_source(path).role == "model"
        assert list(open_source(path).tensors) == list(TENSORS)


def refusal(error, *arguments, **options):
    with pytest.raises(error) as caught:
        open_model(*arguments, **options)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("missing", range(3))
def test_a_missing_shard(shards, missing):
    shards[missing].unlink()
    message = refusal(InputError, shards[(missing + 1) % 3])
    assert f"shard {missing + 1} of 3 is missing: {shards[missing]}" in message


def test_a_shard_of_another_set(tmp_path, shards):
    other = tmp_path / "other"
    other.mkdir()
    language(other / "model.gguf", {}, dict(list(TENSORS.items())[:6]), split_max_tensors=2)
    shutil.copy(other / shards[1].name, shards[1])
    message = refusal(InputError, shards[0])
    assert f"{shards[1]} doesn't belong to the set of {shards[0]}" in message
    assert "[1, 3, 6], expected [1, 3, 9]" in message


def test_shards_that_changed_places(shards):
    shutil.copy(shards[1], shards[2])
    message = refusal(InputError, shards[0])
    assert f"{shards[2]} doesn't belong" in message
    assert "[1, 3, 9], expected [2, 3, 9]" in message


@pytest.mark.parametrize("name", ["renamed.gguf", "model-00001-of-00004.gguf", "model-1-of-3.gguf"])
def test_a_renamed_shard(tmp_path, shards, name):
    renamed = shards[0].rename(tmp_path / name)
    message = refusal(InputError, renamed)
    assert f"{renamed} is one of 3 shards" in message
    assert "-NNNNN-of-00003.gguf" in message


def split_keys(number, count, total):
    kind = gguf.GGUFValueType
    return {
        "split.no": (number, kind.UINT16),
        "split.count": (count, kind.UINT16),
        "split.tensors.count": (total, kind.INT32),
    }


def test_a_tensor_in_two_shards(tmp_path):
    for number in range(2):
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        language(path, split_keys(number, 2, 2), {"blk.0.w": np.zeros(4, np.float32)})
    message = refusal(InputError, path)
    assert "both hold tensor blk.0.w" in message


def test_fewer_tensors_than_claimed(tmp_path):
    for number in range(2):
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        language(path, split_keys(number, 2, 9), {f"blk.{number}.w": np.zeros(4, np.float32)})
    assert "hold 2 tensors but claim 9" in refusal(InputError, path)


def test_a_damaged_shard_is_named(shards):
    shards[1].write_bytes(shards[1].read_bytes()[:-40])
    message = refusal(InputError, shards[0])
    assert str(shards[1]) in message
    assert "cut short" in message


# --- keys that hold something else ------------------------------------------------------------


@pytest.mark.parametrize("value", ["two", 2.5, [1, 2], ["a"]])
@pytest.mark.parametrize("name", ["split.count", "llama.nextn_predict_layers"])
def test_a_number_that_is_none(tmp_path, name, value):
    path = language(tmp_path / "a.gguf", {name: value})
    message = refusal(InputError, path)
    assert f"the key {name}, where a whole number belongs" in message


@pytest.mark.parametrize("name", ["llama.block_count", "llama.embedding_length"])
def test_a_number_of_the_mtp_file_that_is_none(tmp_path, name):
    whole = language(tmp_path / "a.gguf")
    draft = language(tmp_path / "d.gguf", DRAFT_KEYS | {name: "4"}, DRAFT_TENSORS)
    message = refusal(InputError, whole, mtp=draft)
    assert f"{draft} has '4' at the key {name}" in message


def test_no_architecture(tmp_path):
    whole = language(tmp_path / "a.gguf")
    path = tmp_path / "b.gguf"
    path.write_bytes(whole.read_bytes().replace(b"general.architecture", b"general.architectura"))
    assert "no general.architecture key" in refusal(InputError, path)


# --- roles ------------------------------------------------------------------------------------


DRAFT_KEYS = {"llama.block_count": 4, "llama.nextn_predict_layers": 1}
DRAFT_TENSORS = {
    "blk.3.attn_norm.weight": np.ones(4, np.float32),
    "blk.3.nextn.eh_proj.weight": np.ones((4, 8), np.float32),
}


def make(role, path):
    match role:
        case "mmproj":
            return write_gguf(path, {"clip.vision.projection_dim": 4}, TENSORS, architecture="clip")
        case "mtp":
            return language(path, DRAFT_KEYS, DRAFT_TENSORS)
        case "vocabulary":
            return language(path, tensors={})
        case "adapter" | "imatrix":
            return language(path, {"general.type": role})
        case _:
            return language(path)


WRONG_PLACES = [
    ("mmproj", "model", UsageError, "a vision projector (mmproj)", "with --mmproj"),
    ("mtp", "model", UsageError, "a separate MTP file", "with --mtp"),
    ("adapter", "model", UnsupportedError, "a LoRA adapter", "llama-export-lora"),
    ("imatrix", "model", UsageError, "an importance matrix", "give the model"),
    ("vocabulary", "model", UnsupportedError, "a vocabulary without weights", "full model"),
    ("model", "mmproj", UsageError, "a language model", "give it as the model"),
    ("mtp", "mmproj", UsageError, "a separate MTP file", "with --mtp"),
    ("model", "mtp", UsageError, "a language model", "give it as the model"),
    ("mmproj", "mtp", UsageError, "a vision projector", "with --mmproj"),
]


@pytest.mark.parametrize(("role", "place", "error", "what", "advice"), WRONG_PLACES)
def test_a_file_in_the_wrong_place(tmp_path, role, place, error, what, advice):
    path = make(role, tmp_path / "wrong.gguf")
    assert open_source(path).role == role
    if place == "model":
        message = refusal(error, path)
    else:
        message = refusal(error, make("model", tmp_path / "right.gguf"), **{place: path})
    for words in (str(path), what, advice):
        assert words in message


def test_roles_of_the_fixtures():
    for path in sorted(FIXTURES.glob("*/*.gguf")):
        role = next((r for r in ("mmproj", "mtp") if path.name.startswith(f"{r}-")), "model")
        if path.parent.name == "importance":
            role = "imatrix"
        assert open_source(path).role == role, path


def test_a_directory(tmp_path):
    assert "give the GGUF file in it" in refusal(UsageError, tmp_path)


def test_a_name_that_is_too_long(tmp_path):
    assert "too long" in refusal(InputError, tmp_path / ("n" * 300))


# --- projectors -------------------------------------------------------------------------------


def projector(path, width):
    return write_gguf(path, {"clip.vision.projection_dim": width}, TENSORS, architecture="clip")


def test_a_projector_of_the_same_width(tmp_path):
    path = projector(tmp_path / "p.gguf", 4)
    model = open_model(language(tmp_path / "a.gguf"), mmproj=path)
    assert model.projector.path == path
    assert [source.role for source in model.sources] == ["model", "mmproj"]


def test_a_projector_of_another_model(tmp_path):
    path = projector(tmp_path / "p.gguf", 8)
    message = refusal(UsageError, language(tmp_path / "a.gguf"), mmproj=path)
    assert f"{path} projects to 8 channels but {tmp_path / 'a.gguf'} is 4 wide" in message


# --- separate MTP files -----------------------------------------------------------------------


def test_an_mtp_file_continues_the_model(tmp_path):
    shared = {"token_embd.weight": np.zeros((6, 4), np.float32)}
    whole = language(tmp_path / "a.gguf", {"llama.context_length": 99}, TENSORS | shared)
    draft = language(tmp_path / "d.gguf", DRAFT_KEYS, shared | DRAFT_TENSORS)
    model = open_model(whole, mtp=draft)
    assert model.tensors.keys() == TENSORS.keys() | shared.keys() | DRAFT_TENSORS.keys()
    assert [tensor.name for tensor, _ in model.left_out] == ["token_embd.weight"]
    assert model.tensors["token_embd.weight"].file.path == whole
    assert model.tensors["blk.3.nextn.eh_proj.weight"].file.path == draft
    assert model.metadata["llama.block_count"] == 4
    assert model.metadata["llama.nextn_predict_layers"] == 1
    assert model.metadata["llama.context_length"] == 99
    assert len(model.metadata) == len(list(model.metadata)) == len(set(model.metadata))
    assert [source.role for source in model.sources] == ["model", "mtp"]


def test_the_merged_fixture_is_the_whole_one():
    """A model without its MTP blocks and the file of these are the model converted whole."""
    folder = FIXTURES / "qwen35-small"
    merged = open_model(
        folder / "qwen35-small-bf16-no-mtp.gguf", mtp=folder / "mtp-qwen35-small-bf16.gguf"
    )
    whole = open_model(folder / "qwen35-small-bf16.gguf")
    assert merged.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        other = merged.tensors[name]
        assert (other.shape, other.kind) == (tensor.shape, tensor.kind)
        count = tensor.row_count
        assert other.read_rows(0, count).tobytes() == tensor.read_rows(0, count).tobytes()
    for name in whole.metadata:
        if name.startswith("qwen35."):
            np.testing.assert_array_equal(merged.metadata[name], whole.metadata[name], name)


def test_mtp_blocks_that_were_taken_out(tmp_path):
    """Some publishers strip the blocks but leave the keys that count them."""
    whole = language(tmp_path / "a.gguf", DRAFT_KEYS)
    model = open_model(whole, mtp=language(tmp_path / "d.gguf", DRAFT_KEYS, DRAFT_TENSORS))
    assert model.metadata["llama.block_count"] == 4
    assert "blk.3.nextn.eh_proj.weight" in model.tensors


MISMATCHES = [
    ({"llama.block_count": 6}, {}, "continues a model of 5 blocks but", "has 3"),
    ({"llama.embedding_length": 8}, {}, "is 8 channels wide but", "is 4 wide"),
    ({}, {"blk.1.ffn_up.weight": np.zeros((3, 4), np.float32)}, "blk.1.ffn_up.weight", "(3, 4)"),
]


@pytest.mark.parametrize(("keys", "tensors", "first", "second"), MISMATCHES)
def test_an_mtp_file_of_another_model(tmp_path, keys, tensors, first, second):
    whole = language(tmp_path / "a.gguf")
    draft = language(tmp_path / "d.gguf", DRAFT_KEYS | keys, DRAFT_TENSORS | tensors)
    message = refusal(UsageError, whole, mtp=draft)
    for words in (str(whole), str(draft), first, second):
        assert words in message


def test_an_mtp_file_of_another_architecture(tmp_path):
    whole = language(tmp_path / "a.gguf")
    draft = write_gguf(
        tmp_path / "d.gguf",
        {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 4},
        DRAFT_TENSORS,
        architecture="qwen35",
    )
    assert "is of architecture qwen35 but" in refusal(UsageError, whole, mtp=draft)


def test_a_model_that_has_its_mtp_blocks(tmp_path):
    whole = language(tmp_path / "a.gguf", DRAFT_KEYS, TENSORS | DRAFT_TENSORS)
    draft = language(tmp_path / "d.gguf", DRAFT_KEYS, DRAFT_TENSORS)
    assert "holds its MTP blocks already" in refusal(UsageError, whole, mtp=draft)
