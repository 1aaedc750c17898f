"""The stored vector tables, and the tables of signs that are computed."""

import runpy
import sys
from pathlib import Path

import numpy as np
from gguf import quants

from gguf2st.gguf.blocks import grids

SCRIPT = Path(__file__).parents[2] / "fixtures" / "make_grids.py"


def test_the_stored_tables_are_what_the_script_makes(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--check"])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_seven_bits_of_signs():
    bits = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
    expected = 1 - 2 * np.unpackbits(bits[:, None], axis=1, bitorder="little").astype(np.int8)
    assert np.array_equal(grids.signs_of_seven().view(np.int8).reshape(128, 8), expected)


def test_tables_are_read_once():
    assert grids.magnitudes("iq3_s") is grids.magnitudes("iq3_s")
