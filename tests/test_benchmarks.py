"""The benchmarks' short forms: they compare results, not times."""

import os

import pytest

from benchmarks import conversion, decoding, growth, measuring, plot_speed, speed_table
from gguf2st.gguf.blocks import block_type_by_name
from tests.oracles import ggml

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are measured with wait4")


class WheelGgml:
    """ggml's decoders of the xllamacpp wheel: nothing has to be compiled."""

    def decode(self, kind, raw, out):
        out[:] = ggml.dequantize(kind.name, raw.tobytes(), out.size).reshape(out.shape)

    def decode_rounded(self, kind, raw, out):
        self.decode(kind, raw, values := out.astype("f4"))
        bits = values.view("u4")
        out[:] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("benchmarks")
    return {
        "decoding": decoding.short(WheelGgml() if ggml.available() else None),
        "conversion": conversion.short(scratch),
        "growth": growth.short(scratch),
    }


def test_decoders_agree(results):
    types = results["decoding"]["types"]
    assert list(types) == list(decoding.SHORT_TYPES)
    others = ["gguf-py", "ggml"] if ggml.available() else ["gguf-py"]
    for found in types.values():
        assert found["equal_bits"] == others


def test_a_wrong_decoder_is_noticed(monkeypatch):
    rows = decoding.Rows.of(block_type_by_name("Q4_K"), decoding.COLUMNS)
    decode = decoding.decode_rows

    def wrong(*arguments, **options):
        values = decode(*arguments, **options)
        values[0, 77] += 1
        return values

    monkeypatch.setattr(decoding, "decode_rows", wrong)
    with pytest.raises(AssertionError, match="1 differ"):
        decoding.check(rows, None)


def test_conversions_write_what_gguf_py_does(results):
    """`short` has compared the tensors; here that all ways were measured."""
    found = results["conversion"]["models"]["tiny"]
    assert set(found["runs"]) == {"bf16, 1", "write bf16", "gguf-py"}
    sizes = {name: runs[0]["output"] for name, runs in found["runs"].items()}
    assert sizes["write bf16"] == sizes["bf16, 1"]


def test_large_models_are_planned(results):
    plans = results["growth"]["plans"]
    assert plans["experts"]["output"] > 10e9
    assert plans["20 GB"]["output"] > 19.9e9


def test_tables_and_drawing(results, tmp_path):
    for name, found in results.items():
        measuring.write_json(tmp_path / f"{name}.json", found)
    read = speed_table.load(tmp_path)
    assert set(read) == set(results)
    text = speed_table.document(read)
    for name in decoding.SHORT_TYPES:
        assert f"\n| {name} | " in text
    # An aim of each part.
    for aim in ("two threads against one", "whole bf16 conversion", "peak memory"):
        assert aim in text
    drawing = plot_speed.drawing(read)
    assert drawing.count("<svg") == 1
    assert all(f">{name}<" in drawing for name in decoding.SHORT_TYPES)


def test_a_bar_is_met_by_its_worst_value():
    assert speed_table.Bar("", 2, {"a": 2, "b": 3}).met
    assert not speed_table.Bar("", 2, {"a": 1.9, "b": 3}).met
    assert speed_table.Bar("", 2, {"a": 2, "b": 1}, at_most=True).met
    assert not speed_table.Bar("", 2, {"a": 2.1, "b": 1}, at_most=True).met


def test_rounds_are_paired():
    above = [{"wall": 2.0}, {"wall": 30.0}, {"wall": 8.0}]
    below = [{"wall": 1.0}, {"wall": 10.0}, {"wall": 4.0}]
    assert measuring.ratio(above, below, "wall") == 2
    order = []
    subjects = {name: lambda name=name: order.append(name) or {} for name in "ab"}
    runs = measuring.interleaved(subjects, 2)
    assert "".join(order) == "baabba"
    assert {name: len(found) for name, found in runs.items()} == {"a": 2, "b": 2}


def test_a_straight_line():
    line = measuring.straight_line([1, 2, 4], [5, 7, 11])
    assert line == pytest.approx({"slope": 2, "intercept": 3, "r2": 1})
    assert measuring.straight_line([1, 2, 3], [1, 5, 1])["r2"] == pytest.approx(0)


def test_a_process_is_measured_alone():
    held = bytearray(300_000_000)
    run = measuring.process(["/bin/sh", "-c", "exit 0"])
    assert run["peak"] < 50e6 < len(held)
    with pytest.raises(measuring.ProcessError, match="not today"):
        measuring.process(["/bin/sh", "-c", "echo not today >&2; exit 3"])
