"""Peak memory doesn't grow with the model: a sparse GGUF of gigabytes is converted and thrown away."""

import itertools
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

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
)

ROOT = Path(__file__).parents[1]
VOCABULARY = 248_320
BLOCK_BYTES = {F32: (1, 4), BF16: (1, 2), Q4_K: (256, 144)}
LETTERS = "abcdefghijklmnopqrstuvwxyz"

# The process's own high-water mark: ru_maxrss would include what the parent had before exec.
COMMAND = """
import atexit, pathlib, sys
def report():
    status = pathlib.Path("/proc/self/status").read_text()
    print("peak", next(line.split()[1] for line in status.splitlines() if "VmHWM" in line))
atexit.register(report)
from gguf2st.cli import main
main(sys.argv[1:])
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from /proc"
)


def vocabulary():
    """Tokens of one to four letters, and the merges that make them."""
    tokens, merges = [], []
    for length in range(1, 5):
        for letters in itertools.product(LETTERS, repeat=length):
            if len(tokens) == VOCABULARY:
                return tokens, merges
            tokens.append("".join(letters))
            if length > 1:
                merges.append(f"{tokens[-1][:-1]} {letters[-1]}")
    raise AssertionError


def text_array(name, texts):
    return array_key(name, 8, len(texts), b"".join(map(string, texts)))


def write_model(path, width, kind):
    """A one-block Qwen3 whose weights are a hole in the file."""
    tokens, merges = vocabulary()
    keys = [
        text_key("general.architecture", "qwen3"),
        *(
            number_key(f"qwen3.{name}", number)
            for name, number in {
                "block_count": 1,
                "context_length": 4096,
                "embedding_length": width,
                "feed_forward_length": 256,
                "attention.head_count": 4,
                "attention.head_count_kv": 1,
                "attention.key_length": 64,
            }.items()
        ),
        key("qwen3.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-6)),
        text_key("tokenizer.ggml.model", "gpt2"),
        text_key("tokenizer.ggml.pre", "qwen2"),
        text_array("tokenizer.ggml.tokens", tokens),
        array_key("tokenizer.ggml.token_type", 5, VOCABULARY, struct.pack("<i", 1) * VOCABULARY),
        text_array("tokenizer.ggml.merges", merges),
        number_key("tokenizer.ggml.eos_token_id", 0),
    ]
    shapes = {"token_embd": ([width, VOCABULARY], kind), "output_norm": ([width], F32)}
    inner = {
        "attn_norm": [width],
        "attn_q": [width, 256],
        "attn_k": [width, 64],
        "attn_v": [width, 64],
        "attn_q_norm": [64],
        "attn_k_norm": [64],
        "attn_output": [256, width],
        "ffn_norm": [width],
        "ffn_gate": [width, 256],
        "ffn_up": [width, 256],
        "ffn_down": [256, width],
    }
    for name, extents in inner.items():
        shapes[f"blk.0.{name}"] = extents, kind if len(extents) > 1 else F32
    tensors, offset = [], 0
    for name, (extents, code) in shapes.items():
        tensors.append(entry(f"{name}.weight", extents, code, offset))
        elements, nbytes = BLOCK_BYTES[code]
        offset += (
            -(-extents[0] * (extents[1] if extents[1:] else 1) // elements * nbytes // 32) * 32
        )
    header = craft(keys, tensors)
    path.write_bytes(header)
    os.truncate(path, len(header) + offset)
    return path


def peak_of_converting(tmp_path, width, kind):
    """Peak resident bytes of the process that converts such a model, and the output's size."""
    model = write_model(tmp_path / "m.gguf", width, kind)
    output = tmp_path / "out"
    try:
        found = subprocess.run(
            [sys.executable, "-c", COMMAND, "convert", str(model), "-o", str(output)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert found.returncode == 0, found.stderr
        size = sum(path.stat().st_size for path in output.iterdir())
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return int(found.stdout.split()[-1]) * 1024, size


@pytest.fixture(scope="module")
def tenth(tmp_path_factory):
    """The peak for a model with the same vocabulary and a tenth of the weights."""
    return peak_of_converting(tmp_path_factory.mktemp("tenth"), 512, Q4_K)


@pytest.mark.parametrize("kind", [Q4_K, BF16], ids=["Q4_K", "BF16"])
def test_peak_memory(tmp_path, tenth, kind):
    if shutil.disk_usage(tmp_path).free < 4_000_000_000:
        pytest.skip("the output takes 2.6 GB")
    peak, size = peak_of_converting(tmp_path, 5120, kind)
    assert size > 2_540_000_000 > 9 * tenth[1]
    assert peak < 500_000_000  # measured: 160 MB with two workers
    assert abs(peak - tenth[0]) < 60_000_000
