"""Files: what is linked, what is rewritten, what is refused, and that the input stays as it was."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

import gguf2st
from gguf2st.cli import main
from gguf2st.repairing import runner, writing
from tests.conversions import load
from tests.repairing.test_cases import check_equal, states
from tests.verification.editing import base, opened

INDEX = "model.safetensors.index.json"


def sharded(directory: Path, count: int = 3) -> Path:
    """A quantized checkpoint in several files whose config excepts a quantized module."""
    source = base("llama", "ct", group_size=32)
    edit = opened(source)
    edit.quantization["ignore"].append("model.layers.0.mlp.down_proj")
    edit.write(directory, source)
    (directory / "model.safetensors").unlink()
    names, places = sorted(edit.tensors), {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = names[number * len(names) // count : (number + 1) * len(names) // count]
        save_file(
            {n: edit.tensors[n] for n in part}, directory / file, {"format": "pt", "by": "us"}
        )
        places |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in edit.tensors.values())
    content = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(content))
    return directory


def inodes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in directory.iterdir()}


def test_unchanged_shards_are_linked(tmp_path: Path) -> None:
    source, output = sharded(tmp_path / "in"), tmp_path / "out"
    report = gguf2st.repair(source, output)
    assert report.files == {"rewritten": 1, "linked": 3, "copied": report.files["copied"]}
    same = {name for name, inode in inodes(output).items() if inode == inodes(source).get(name)}
    # Nobody edits weights in place; config and tokenizer are edited, and belong to one directory.
    assert same == {path.name for path in source.glob("*.safetensors")}
    check_equal(load(output), load(source))
    assert "3 linked" in report.to_text()


def test_only_the_shards_that_change_are_written(tmp_path: Path) -> None:
    source, output = sharded(tmp_path / "in"), tmp_path / "out"
    edit = json.loads((source / INDEX).read_text())
    touched = edit["weight_map"]["model.layers.0.mlp.down_proj.weight_packed"]
    # Groups of 32 columns over 16 ranks: down_proj and o_proj of both layers are dequantized.
    report = gguf2st.repair(source, output, tensor_parallel=(16,), engines=("vllm",))
    assert report.right and "model.layers.0.mlp.down_proj" in report.dequantized
    rewritten = {shard.file for shard in report.plan.shards}
    assert touched in rewritten
    index = json.loads((output / INDEX).read_text())
    held = {p.name: set(load_one(p)) for p in output.glob("*.safetensors")}
    assert {n: f for f, names in held.items() for n in names} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load(output).values())
    for name, inode in inodes(source).items():
        if name.endswith(".safetensors"):
            assert (inodes(output)[name] == inode) == (name not in rewritten)


def load_one(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as shard:
        return list(shard.keys())


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot of a hub's cache holds links to blobs without a suffix."""
    real = sharded(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(real.iterdir())):
        blob = path.rename(real / f"{number:064}")
        (snapshot / path.name).symlink_to(blob)
    report = gguf2st.repair(snapshot, tmp_path / "out")
    assert report.files["linked"] == 3
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    check_equal(load(tmp_path / "out"), load(snapshot))


def test_without_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    source = sharded(tmp_path / "in")
    report = gguf2st.repair(source, tmp_path / "out")
    assert "linked" not in report.files
    assert not set(inodes(source).values()) & set(inodes(tmp_path / "out").values())
    check_equal(load(tmp_path / "out"), load(source))


def test_reflinks_come_before_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has them; this one needn't."""
    cloned = []

    def clone(source: Path, target: Path) -> bool:
        cloned.append(shutil.copyfile(source, target))
        return True

    monkeypatch.setattr(writing, "_cloned", clone)
    report = gguf2st.repair(sharded(tmp_path / "in"), tmp_path / "out")
    assert report.files["reflinked"] == len(cloned) and "copied" not in report.files


def test_folders_come_along_and_hidden_ones_do_not(tmp_path: Path) -> None:
    source = sharded(tmp_path / "in")
    for name in ("1_Pooling", ".git"):
        (source / name).mkdir()
        (source / name / "config.json").write_text("{}")
    gguf2st.repair(source, tmp_path / "out")
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "{}"
    assert not (tmp_path / "out" / ".git").exists()


def test_a_sound_checkpoint_is_taken_over(tmp_path: Path) -> None:
    source = base("llama", "ct", group_size=32)
    report = gguf2st.repair(source, tmp_path / "out")
    assert report.right and not report.plan.changes and not report.plan.documents
    assert "nothing needs to be" in report.to_text()
    check_equal(load(tmp_path / "out"), load(source))


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sharded(tmp_path / "in")
    main_ends(["repair", str(source), "-o", str(tmp_path / "out"), "--dry-run"], 0)
    assert "would write" in capsys.readouterr().out
    main_ends(["repair", str(source), "-o", str(tmp_path / "out"), "--dry-run", "--json"], 0)
    said = json.loads(capsys.readouterr().out)
    [change] = said["config_changes"]
    assert change["key"] == "quantization_config.ignore" and not said["written"]
    assert said["documents"]["config.json"]["quantization_config"]["ignore"] == change["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_dry_run_needs_headers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sharded(tmp_path / "in")
    for path in source.glob("*.safetensors"):
        with path.open("r+b") as stream:
            stream.truncate(8 + int.from_bytes(stream.read(8), "little"))
    assert gguf2st.repair(source, tmp_path / "out", dry_run=True).right
    main_ends(["repair", str(source), "-o", str(tmp_path / "out")], 3)
    assert "end behind their headers" in capsys.readouterr().err


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sharded(tmp_path / "in")
    output = str(tmp_path / "out")
    main_ends(["repair", str(source), "-o", output], 0)
    main_ends(["repair", str(source), "-o", output], 5)
    assert "--force" in capsys.readouterr().err
    main_ends(["repair", str(source), "-o", output, "--force"], 0)
    main_ends(["repair", str(source), "-o", output, "--engine", "llama.cpp"], 2)
    (source / "tokenizer.json").unlink()
    main_ends(["repair", str(source), "-o", str(tmp_path / "other")], 1)
    assert "not written" in capsys.readouterr().out and not (tmp_path / "other").exists()
    # transformers loads the weights without.
    main_ends(["repair", str(source), "-o", str(tmp_path / "other"), "--engine", "hf"], 0)


def main_ends(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code


@pytest.mark.parametrize("place", ["in", "in/out", "."])
def test_the_input_is_never_written_to(place: str, tmp_path: Path) -> None:
    source = sharded(tmp_path / "in")
    before = states(source)
    with pytest.raises(gguf2st.OutputError, match="never changed"):
        gguf2st.repair(source, tmp_path / place, force=True)
    assert states(source) == before


def test_what_is_not_verified_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged output is found before the directory takes its name."""
    source = sharded(tmp_path / "in")
    write = writing.write

    def damaged(plan: gguf2st.RepairPlan, target: Path) -> dict[str, int]:
        counts = write(plan, target)
        shutil.copy(source / "config.json", target)
        return counts

    monkeypatch.setattr(runner, "write", damaged)
    with pytest.raises(gguf2st.VerificationError, match="D-01"):
        gguf2st.repair(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_files_that_end_early(tmp_path: Path) -> None:
    """One file is cut: the others have their data, so it is damaged and not merely not fetched."""
    source = sharded(tmp_path / "in")
    path = max(source.glob("*.safetensors"))
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 100)
    report = gguf2st.repair(source, tmp_path / "out")
    assert not report.right and "100 bytes before" in report.to_text()


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    """Of a class whose parameters aren't known, only the index tells that weights are missing."""
    source = sharded(tmp_path / "in")
    edit = json.loads((source / "config.json").read_text())
    edit["architectures"] = ["SomethingForCausalLM"]
    (source / "config.json").write_text(json.dumps(edit))
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00004-of-00003.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    report = gguf2st.repair(source, tmp_path / "out")
    assert not report.right and "model-00004-of-00003" in report.to_text()
    # The tensor is there, in another file.
    index["weight_map"]["model.norm.weight"] = index["weight_map"].pop("model.extra.weight")
    (source / INDEX).write_text(json.dumps(index))
    report = gguf2st.repair(source, tmp_path / "out")
    assert report.right
    said = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert (tmp_path / "out" / said["model.norm.weight"]).exists()


def test_a_file_that_the_index_does_not_name(tmp_path: Path) -> None:
    """It holds what is missing, so the index is wrong; a copy of what is there is left out."""
    source = sharded(tmp_path / "in")
    index = json.loads((source / INDEX).read_text())
    last = max(index["weight_map"].values())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != last}
    (source / INDEX).write_text(json.dumps(index))
    shutil.copy(source / min(index["weight_map"].values()), source / "old.safetensors")
    report = gguf2st.repair(source, tmp_path / "out")
    assert report.right, report.to_text()
    assert report.plan.left_out == ("old.safetensors",)
    check_equal(load(tmp_path / "out"), load(source))


def test_tensors_of_two_files(tmp_path: Path) -> None:
    """The index says which one counts."""
    source = sharded(tmp_path / "in")
    index = json.loads((source / INDEX).read_text())
    name = "model.norm.weight"
    other = next(f for f in index["weight_map"].values() if f != index["weight_map"][name])
    from safetensors.torch import load_file

    first = load_file(source / other)
    save_file(first | {name: load(source)[name] * 2}, source / other, {"format": "pt"})
    expected = load_file(source / index["weight_map"][name])[name]
    report = gguf2st.repair(source, tmp_path / "out")
    assert report.right and name in report.to_text()
    assert [shard.file for shard in report.plan.shards] == [other]
    assert name not in load_file(tmp_path / "out" / other)
    check_equal({name: load(tmp_path / "out")[name]}, {name: expected})


def test_most_tensors_decide_about_dtype(tmp_path: Path) -> None:
    """Where nearly all weights are float16, config.json is wrong, and nothing is cast."""
    source = base("llama", "f16")
    edit = opened(source)
    edit.config["dtype"] = "bfloat16"
    report = gguf2st.repair(edit.write(tmp_path / "in", source), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert not report.plan.shards
