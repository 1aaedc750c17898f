"""Synthetic GGUF files of any size: sparse, their weights holes that read as zeros, or filled.

Sparse files take no room on disk, so models of any size can be converted. Their weights are zeros:
memory and bytes are those of a real model, and so is the time of decoding; an easy search isn't.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from gguf2st.gguf.blocks import block_type
from tests.blocks.samples import sound_bytes

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEAD = 128
# Filled tensors repeat so many bytes: too many for a disk or a cache to notice.
PATTERN_BYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor: name, shape in torch order, type."""

    name: str
    shape: tuple[int, ...]
    kind: Type

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * size


@dataclass(frozen=True)
class Decoder:
    """A Qwen3 model, or with `experts` a Qwen3 MoE model, without a head of its own."""

    layers: int
    hidden: int = 2048
    mlp: int = 6144
    queries: int = 16
    keys: int = 4
    experts: int = 0
    vocabulary: int = 8192

    @property
    def layer_parameters(self) -> int:
        """Weights of a block's matrices."""
        attention = 2 * (self.queries + self.keys) * HEAD * self.hidden
        return attention + 3 * max(1, self.experts) * self.mlp * self.hidden

    @property
    def parameters(self) -> int:
        """Weights of all matrices."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def tensors(self) -> Iterator[Entry]:
        """All tensors, of the types that a Q4_K_M gives them."""
        yield Entry("token_embd.weight", (self.vocabulary, self.hidden), Type.Q4_K)
        yield Entry("output_norm.weight", (self.hidden,), Type.F32)
        for layer in range(self.layers):
            finer = Type.Q6_K if layer % 2 else Type.Q4_K
            yield from self._layer(f"blk.{layer}", finer)

    def _layer(self, block: str, finer: Type) -> Iterator[Entry]:
        queries, keys = self.queries * HEAD, self.keys * HEAD
        for norm in ("attn_norm", "ffn_norm"):
            yield Entry(f"{block}.{norm}.weight", (self.hidden,), Type.F32)
        for norm in ("attn_q_norm", "attn_k_norm"):
            yield Entry(f"{block}.{norm}.weight", (HEAD,), Type.F32)
        yield Entry(f"{block}.attn_q.weight", (queries, self.hidden), Type.Q4_K)
        yield Entry(f"{block}.attn_k.weight", (keys, self.hidden), Type.Q4_K)
        yield Entry(f"{block}.attn_v.weight", (keys, self.hidden), finer)
        yield Entry(f"{block}.attn_output.weight", (self.hidden, queries), Type.Q4_K)
        stack, suffix = ((self.experts,), "_exps") if self.experts else ((), "")
        if self.experts:
            yield Entry(f"{block}.ffn_gate_inp.weight", (self.experts, self.hidden), Type.F32)
        for name, shape, kind in (
            ("gate", (self.mlp, self.hidden), Type.Q4_K),
            ("up", (self.mlp, self.hidden), Type.Q4_K),
            ("down", (self.hidden, self.mlp), finer),
        ):
            yield Entry(f"{block}.ffn_{name}{suffix}.weight", stack + shape, kind)

    def write(self, path: Path, *, filled: bool = False) -> Path:
        """Write the model; `filled` with random codes and scales of a usual size."""
        writer = gguf.GGUFWriter(path, "qwen3moe" if self.experts else "qwen3")
        writer.add_name(path.stem)
        writer.add_block_count(self.layers)
        writer.add_context_length(4096)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.mlp)
        writer.add_head_count(self.queries)
        writer.add_head_count_kv(self.keys)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1_000_000.0)
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(2)
            writer.add_expert_feed_forward_length(self.mlp)
        add_vocabulary(writer, self.vocabulary, "qwen2", SPECIAL)
        return write_sparse(writer, path, self.tensors(), filled=filled)


def add_vocabulary(
    writer: gguf.GGUFWriter, size: int, pre_tokenizer: str, special: Sequence[str]
) -> None:
    """Every byte, words of two up to the full size, and the special tokens: end of text, ..., end of turn."""
    # GPT-2's stand-ins for bytes: themselves where they print, then characters from 256 on.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    single = [chr(code) for code in [*printing, *range(256, 512 - len(printing))]]
    pairs = [a + b for a in single for b in single][: size - len(single) - len(special)]
    tokens = [*single, *pairs]
    unused = [f"<|unused{n}|>" for n in range(size - len(tokens) - len(special))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([*tokens, *special, *unused])
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(special)
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * len(unused)])
    writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in pairs])
    writer.add_eos_token_id(len(tokens) + 2)
    writer.add_pad_token_id(len(tokens))


def write_sparse(
    writer: gguf.GGUFWriter, path: Path, entries: Iterable[Entry], *, filled: bool = False
) -> Path:
    """Write the header that the writer has gathered, and room for the tensors."""
    entries = list(entries)
    for entry in entries:
        # The writer takes a quantized tensor's shape in bytes, as an array of its data would have.
        shape = gguf.quant_shape_to_byte_shape(entry.shape, entry.kind)
        quantized = entry.kind not in (Type.F32, Type.F16)
        dtype = np.dtype(np.float16 if entry.kind == Type.F16 else np.float32)
        writer.add_tensor_info(
            entry.name,
            shape if quantized else entry.shape,
            np.dtype(np.uint8) if quantized else dtype,
            entry.nbytes,
            entry.kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    offset = _aligned(path.stat().st_size, writer)
    with path.open("r+b") as file:
        for entry in entries:
            if filled:
                _fill(file.fileno(), offset, entry)
            offset += _aligned(entry.nbytes, writer)
    os.truncate(path, offset)
    return path


def _aligned(nbytes: int, writer: gguf.GGUFWriter) -> int:
    return -(-nbytes // writer.data_alignment) * writer.data_alignment


def _fill(file: int, offset: int, entry: Entry) -> None:
    kind = block_type(entry.kind.value)
    if entry.kind == Type.F32:
        pattern = np.ones(PATTERN_BYTES // 4, np.float32).tobytes()
    else:
        pattern = sound_bytes(kind, PATTERN_BYTES // kind.block_bytes, seed=1).tobytes()
    for start in range(0, entry.nbytes, len(pattern)):
        os.pwrite(file, pattern[: entry.nbytes - start], offset + start)
