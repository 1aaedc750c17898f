"""Which types there are, and what is said of those that there aren't."""

import copy
import pickle

import numpy as np
import pytest

from gguf2st.errors import UnsupportedError
from gguf2st.gguf.blocks import BlockType, block_type, block_type_by_name, known_block_types

# Number, name, elements and bytes of a block.
TYPES = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
]


def test_the_table_of_types():
    found = [(kind.code, kind.name, kind.block_size, kind.block_bytes) for kind in known()]
    assert found == TYPES


def known():
    return known_block_types()


@pytest.mark.parametrize(("code", "name"), [row[:2] for row in TYPES])
def test_number_and_name_lead_to_one_instance(code, name):
    kind = block_type(code)
    assert kind is block_type_by_name(name) is block_type_by_name(name.lower())
    assert kind is copy.deepcopy(kind) is pickle.loads(pickle.dumps(kind))
    assert name in repr(kind)
    assert kind.layout.itemsize == kind.block_bytes
    assert kind.__doc__


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (4, ["Q4_2", "removed from ggml"]),
        (5, ["Q4_3", "removed from ggml"]),
        (31, ["Q4_0_4_4", "removed from ggml"]),
        (32, ["Q4_0_4_8", "removed from ggml"]),
        (33, ["Q4_0_8_8", "removed from ggml"]),
        (36, ["IQ4_NL_4_4", "removed from ggml", "bitnet.cpp", "I2_S"]),
        (37, ["IQ4_NL_4_8", "removed from ggml"]),
        (38, ["IQ4_NL_8_8", "removed from ggml"]),
        (9, ["Q8_1", "in memory only"]),
        (15, ["Q8_K", "in memory only"]),
        (133, ["Q6_0", "ik_llama.cpp"]),
        (137, ["IQ2_K", "ik_llama.cpp"]),
        (144, ["IQ4_KS", "ik_llama.cpp"]),
        (158, ["IQ1_KT", "ik_llama.cpp"]),
        (212, ["Q4_K_R4", "ik_llama.cpp"]),
        (43, ["unknown"]),
        (-1, ["unknown"]),
        (1 << 31, ["unknown"]),
    ],
)
def test_numbers_without_a_decoder(code, words):
    with pytest.raises(UnsupportedError) as caught:
        block_type(code)
    message = str(caught.value)
    for word in [f"Block type {code} ", *words]:
        assert word in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "words"),
    [("Q4_2", "removed from ggml"), ("iq4_kss", "ik_llama.cpp"), ("Q9_Z", "choose one of F32")],
)
def test_names_without_a_decoder(name, words):
    with pytest.raises(UnsupportedError, match=words):
        block_type_by_name(name)


def test_a_number_can_not_be_given_twice():
    with pytest.raises(TypeError, match="Q4_K"):
        type(
            "Twin",
            (BlockType,),
            {
                "code": 12,
                "block_size": 1,
                "layout": np.dtype([("value", "u1")]),
                "decode_into": lambda self, blocks, out: None,
            },
        )
