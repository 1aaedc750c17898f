"""llama.cpp's converter makes the same vocabulary from the written files again."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from gguf2st.gguf.container import GgufFile
from tests.checkpoint.vocabularies import files, metadata, write
from tests.oracles.llama_cpp_source import llama_cpp_source

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


def test_converting_smollm2_back_gives_the_same_vocabulary(tmp_path: Path) -> None:
    """Tokens, types, merges, special ids, and the pre-tokenizer that the converter recognises."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, files("smollm2"), **CONFIG)
    target = tmp_path / "vocabulary.gguf"
    script = llama_cpp_source() / "convert_hf_to_gguf.py"
    command = [sys.executable, str(script), "--vocab-only", "--outfile", str(target), str(folder)]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
    assert done.returncode == 0, done.stderr[-2000:]
    again, original = GgufFile(target).metadata, metadata("smollm2")
    written_by_vendor = {"tokenizer.chat_template", "tokenizer.ggml.add_space_prefix"}
    for key in original:
        if not key.startswith("tokenizer.") or key in written_by_vendor:
            continue
        assert np.array_equal(again[key], original[key]), key
