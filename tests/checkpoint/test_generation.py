import math

import numpy as np
import pytest
from transformers import GenerationConfig

from gguf2st.checkpoint.generation import end_of_turn_ids, generation_config
from gguf2st.errors import InputError
from tests.checkpoint.small import CONTROL, NORMAL, USER_DEFINED, byte_pair, scored
from tests.checkpoint.vocabularies import metadata

FIRST = 260  # id of the first token given to byte_pair


def control(*texts: str, **keys):
    return byte_pair(*((text, CONTROL) for text in texts), **keys)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # Qwen 2.5 and 3: the list of the originals' generation_config.json, in its order.
        (control("<|endoftext|>", "<|im_start|>", "<|im_end|>", eos_token_id=FIRST + 2), [2, 0]),
        # Llama 3: <|eom_id|> ends a message, after which the tool answers.
        (
            control("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", eos_token_id=FIRST + 2),
            [2, 0],
        ),
        # The same with the message's end named by the file.
        (
            control("<|end_of_text|>", "<|eom_id|>", eos_token_id=FIRST, eom_token_id=FIRST + 1),
            [0],
        ),
        # gpt-oss: <|end|> ends one message of several in a turn.
        (
            control("<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", eos_token_id=FIRST + 1),
            [1, 0, 3],
        ),
        # Phi-3 has no calls, there it ends the turn.
        (control("<|endoftext|>", "<|end|>", eos_token_id=FIRST), [0, 1]),
        # Solar Open.
        (control("<|end|>", "<|flush|>", "<|calls|>", eos_token_id=FIRST + 1), [1, 2]),
        # GLM 4: the end of a turn is the beginning of the user's.
        (control("<|endoftext|>", "<|user|>", eos_token_id=FIRST, eot_token_id=FIRST + 1), [0, 1]),
        # Code models: tokens that fill gaps end no turn, though llama.cpp stops at them.
        (
            control(
                "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", eos_token_id=FIRST
            ),
            [0],
        ),
        (control("a", eos_token_id=FIRST), [0]),
        (control("a"), []),
    ],
)
def test_tokens_that_end_a_turn(content, expected) -> None:
    assert end_of_turn_ids(content) == [FIRST + number for number in expected]


def test_markup_ends_no_turn() -> None:
    """Gemma has </s> as the end of struck-out text, Mistral as the end of a turn."""
    assert end_of_turn_ids(metadata("gemma3")) == [1, 106]
    struck = byte_pair(
        ("<eos>", CONTROL), ("</s>", USER_DEFINED), ("[EOT]", NORMAL), eos_token_id=FIRST
    )
    assert end_of_turn_ids(struck) == [FIRST]
    assert end_of_turn_ids(scored()) == [2]


def test_gemma_4_stops_for_the_tool() -> None:
    """The three ids that Google's own file lists."""
    assert sorted(end_of_turn_ids(metadata("gemma-4"))) == [1, 50, 106]


def test_ids_stand_alone_or_in_a_list() -> None:
    assert generation_config(metadata("smollm2")) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
        "pad_token_id": 2,
    }
    assert generation_config(metadata("llama-spm")) == {"bos_token_id": 1, "eos_token_id": 2}
    assert generation_config({}) == {}


def test_a_file_without_a_vocabulary_may_name_ids() -> None:
    content = {"tokenizer.ggml.model": "none", "tokenizer.ggml.eos_token_id": 7}
    assert generation_config(content) == {"eos_token_id": 7}


def sampling(**keys):
    return {f"general.sampling.{name}": value for name, value in keys.items()}


def test_sampling_keys() -> None:
    single = {name: float(np.float32(value)) for name, value in (("temp", 0.6), ("top_p", 0.95))}
    content = sampling(**single, top_k=20, min_p=0.0, penalty_repeat=float(np.float32(1.05)))
    config = generation_config(content)
    assert config == {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }
    loaded = GenerationConfig.from_dict(config)
    loaded.validate(strict=True)
    assert loaded.top_k == 20


def test_temperature_zero_means_no_sampling() -> None:
    config = generation_config(sampling(temp=0.0, top_p=0.9, top_k=40))
    assert config == {"do_sample": False}
    GenerationConfig.from_dict(config).validate(strict=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temp", math.nan),
        ("temp", -1.0),
        ("top_p", 1.5),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", math.inf),
        ("penalty_repeat", 0.0),
        ("temp", "warm"),
        ("top_k", True),
    ],
)
def test_values_that_no_engine_takes_are_left_out(name: str, value) -> None:
    warnings: list[str] = []
    assert generation_config(sampling(**{name: value}), warnings=warnings) == {}
    assert f"general.sampling.{name}" in warnings[0]


def test_unknown_sampling_keys_are_ignored() -> None:
    assert generation_config(sampling(mirostat=2, xtc_threshold=0.1, sequence="k")) == {}


def test_an_id_beyond_the_vocabulary() -> None:
    with pytest.raises(InputError, match=r"eos_token_id is 9999.*no id of the 260 tokens"):
        generation_config(byte_pair(eos_token_id=9999))
