"""Finds a block type by number or name, and says why when there is none."""

# Importing a family registers its types.
from gguf2st.errors import UnsupportedError
from gguf2st.gguf.blocks import (  # noqa: F401
    fp4,
    iq4_quants,
    iq_quants,
    k_quants,
    legacy,
    plain,
    ternary,
)
from gguf2st.gguf.blocks.base import BY_CODE, BlockType

# ggml/include/ggml.h (`enum ggml_type`) and ggml/src/ggml.c (`type_traits`).
_REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# Inputs of ggml's dot products: they exist in memory only.
_NEVER_STORED = {9: "Q8_1", 15: "Q8_K"}

# ggml/include/ggml.h of github.com/ikawrakow/ik_llama.cpp.
_IK_LLAMA = {
    133: "Q6_0",
    134: "IQ1_BN",
    135: "IQ2_BN",
    136: "Q8_K64",
    137: "IQ2_K",
    138: "IQ3_K",
    139: "IQ4_K",
    140: "IQ5_K",
    141: "IQ6_K",
    142: "IQ2_TN",
    143: "IQ1_TN",
    144: "IQ4_KS",
    145: "IQ2_KS",
    146: "IQ4_KSS",
    147: "Q8_K16",
    148: "Q8_K32",
    149: "Q8_KR8",
    150: "Q8_K128",
    151: "Q8_KV",
    152: "IQ5_KS",
    153: "IQ2_KT",
    154: "IQ3_KT",
    155: "IQ4_KT",
    156: "IQ3_KS",
    157: "IQ2_KL",
    158: "IQ1_KT",
    202: "Q4_0_R8",
    206: "Q5_0_R4",
    208: "Q8_0_R8",
    210: "Q2_K_R4",
    211: "Q3_K_R4",
    212: "Q4_K_R4",
    213: "Q5_K_R4",
    214: "Q6_K_R4",
    216: "IQ2_XXS_R4",
    217: "IQ2_XS_R4",
    218: "IQ3_XXS_R4",
    219: "IQ1_S_R4",
    220: "IQ4_NL_R4",
    221: "IQ3_S_R4",
    222: "IQ2_S_R4",
    223: "IQ4_XS_R8",
    229: "IQ1_M_R4",
    230: "BF16_R16",
    233: "Q6_0_R4",
    335: "IQ2_BN_R4",
    337: "IQ2_K_R4",
    338: "IQ3_K_R4",
    339: "IQ4_K_R4",
    340: "IQ5_K_R4",
    344: "IQ4_KS_R4",
    398: "Q8_KV_R8",
    399: "Q8_K_R8",
}

# The same number as one that ggml removed.
_BITNET_I2_S = 36


def known_block_types() -> tuple[BlockType, ...]:
    """Return every block type that can be decoded, in the order of their numbers."""
    return tuple(BY_CODE[code] for code in sorted(BY_CODE))


def block_type(code: int) -> BlockType:
    """Return the block type with a number of ggml's `enum ggml_type`.

    Raises:
        UnsupportedError: no decoder has this number. The message tells what the
            number once meant, or which fork of llama.cpp writes it.
    """
    known = BY_CODE.get(code)
    if known is None:
        raise UnsupportedError(_why_unsupported(code))
    return known


def block_type_by_name(name: str) -> BlockType:
    """Return the block type with ggml's name, in capital or small letters ("Q4_K").

    Raises:
        UnsupportedError: no decoder has this name; the message says what is known
            of the name.
    """
    wanted = name.upper()
    for kind in BY_CODE.values():
        if kind.name == wanted:
            return kind
    for table in (_REMOVED, _NEVER_STORED, _IK_LLAMA):
        for code, foreign in table.items():
            if foreign == wanted:
                raise UnsupportedError(_why_unsupported(code))
    names = ", ".join(kind.name for kind in known_block_types())
    raise UnsupportedError(f"There is no block type {name!r}; choose one of {names}.")


def _why_unsupported(code: int) -> str:
    """Say in one sentence why a number has no decoder and what to do."""
    if code in _REMOVED:
        message = f"Block type {code} was {_REMOVED[code]}, which was removed from ggml"
        if code == _BITNET_I2_S:
            message += ", and bitnet.cpp and ik_llama.cpp use the same number for their I2_S"
        return message + "; take a GGUF file that a current llama.cpp has written."
    if code in _NEVER_STORED:
        return (
            f"Block type {code} is {_NEVER_STORED[code]}, which ggml uses in memory only and never "
            "stores; the file is damaged or was written by a faulty program."
        )
    if code in _IK_LLAMA:
        return (
            f"Block type {code} is {_IK_LLAMA[code]} of the fork ik_llama.cpp, which llama.cpp "
            "and gguf2st don't decode; take a GGUF file that llama.cpp itself has written."
        )
    return (
        f"Block type {code} is unknown; the file is damaged, newer than this gguf2st (try to "
        "update it), or written by a fork of llama.cpp."
    )
