"""The headline model at its real size: Qwen3.5-27B with its projector and MTP block, as sparse files.

    python -m benchmarks.headline /tmp/headline --to awq --tp 1,2

The GGUF has the exact tensor list of a mixed Q4_K_M of that model, and a vocabulary of its size; all
weights are holes in the file, so they read as zeros and take no room on disk. Converts it, then prints
as JSON: wall and CPU seconds, the peak of resident memory, bytes read and written.

Zeros are an easy search, so the seconds aren't those of a real model; memory and bytes are.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Type

from benchmarks.sparse import Entry, add_vocabulary, write_sparse

HIDDEN, MLP, VOCABULARY = 5120, 17408, 248_320
LAYERS, INTERVAL = 64, 4
QUERIES, KEYS, HEAD = 24, 4, 256
GDN_KEYS, GDN_VALUES, GDN_HEAD, CONVOLUTION = 16, 48, 128, 4
VISION, VISION_MLP, VISION_DEPTH, VISION_HEADS, PATCH, POSITIONS = 1152, 4304, 27, 16, 16, 2304
MERGED = 4 * VISION
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def language_tensors() -> Iterator[Entry]:
    """866 tensors, of the types that a mix of Q4_K_M and IQ4_XS gives them."""
    yield Entry("token_embd.weight", (VOCABULARY, HIDDEN), Type.Q4_K)
    yield Entry("output_norm.weight", (HIDDEN,), Type.F32)
    yield Entry("output.weight", (VOCABULARY, HIDDEN), Type.Q6_K)
    for layer in range(LAYERS):
        finer = layer < LAYERS // 8 or layer % 3 == 2
        attention = _full_attention if layer % INTERVAL == INTERVAL - 1 else _delta_net
        yield from attention(f"blk.{layer}", finer=finer)
        yield from _feed_forward(f"blk.{layer}", finer=finer)
    yield from _full_attention(f"blk.{LAYERS}", finer=True)
    yield from _feed_forward(f"blk.{LAYERS}", finer=True)
    yield Entry(f"blk.{LAYERS}.nextn.eh_proj.weight", (HIDDEN, 2 * HIDDEN), Type.Q4_K)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        yield Entry(f"blk.{LAYERS}.nextn.{norm}.weight", (HIDDEN,), Type.F32)


def _full_attention(block: str, *, finer: bool) -> Iterator[Entry]:
    yield Entry(f"{block}.attn_norm.weight", (HIDDEN,), Type.F32)
    yield Entry(f"{block}.attn_q.weight", (2 * QUERIES * HEAD, HIDDEN), Type.Q4_K)
    yield Entry(f"{block}.attn_k.weight", (KEYS * HEAD, HIDDEN), Type.Q4_K)
    yield Entry(f"{block}.attn_v.weight", (KEYS * HEAD, HIDDEN), Type.Q6_K if finer else Type.Q5_K)
    yield Entry(f"{block}.attn_output.weight", (HIDDEN, QUERIES * HEAD), Type.Q4_K)
    yield Entry(f"{block}.attn_q_norm.weight", (HEAD,), Type.F32)
    yield Entry(f"{block}.attn_k_norm.weight", (HEAD,), Type.F32)
    yield Entry(f"{block}.post_attention_norm.weight", (HIDDEN,), Type.F32)


def _delta_net(block: str, *, finer: bool) -> Iterator[Entry]:
    values, joined = GDN_VALUES * GDN_HEAD, (2 * GDN_KEYS + GDN_VALUES) * GDN_HEAD
    yield Entry(f"{block}.attn_norm.weight", (HIDDEN,), Type.F32)
    yield Entry(f"{block}.attn_qkv.weight", (joined, HIDDEN), Type.Q5_K if finer else Type.IQ4_XS)
    yield Entry(f"{block}.attn_gate.weight", (values, HIDDEN), Type.IQ4_XS)
    yield Entry(f"{block}.ssm_a", (GDN_VALUES,), Type.F32)
    yield Entry(f"{block}.ssm_alpha.weight", (GDN_VALUES, HIDDEN), Type.Q4_K)
    yield Entry(f"{block}.ssm_beta.weight", (GDN_VALUES, HIDDEN), Type.Q4_K)
    yield Entry(f"{block}.ssm_conv1d.weight", (joined, CONVOLUTION), Type.F32)
    yield Entry(f"{block}.ssm_dt.bias", (GDN_VALUES,), Type.F32)
    yield Entry(f"{block}.ssm_norm.weight", (GDN_HEAD,), Type.F32)
    yield Entry(f"{block}.ssm_out.weight", (HIDDEN, values), Type.Q4_K)
    yield Entry(f"{block}.post_attention_norm.weight", (HIDDEN,), Type.F32)


def _feed_forward(block: str, *, finer: bool) -> Iterator[Entry]:
    yield Entry(f"{block}.ffn_gate.weight", (MLP, HIDDEN), Type.IQ4_XS)
    yield Entry(f"{block}.ffn_up.weight", (MLP, HIDDEN), Type.Q4_K)
    yield Entry(f"{block}.ffn_down.weight", (HIDDEN, MLP), Type.Q6_K if finer else Type.Q4_K)


def projector_tensors() -> Iterator[Entry]:
    """The vision tower and its merger, as llama.cpp's converter writes them in F16."""
    for layer in range(VISION_DEPTH):
        block = f"v.blk.{layer}"
        for name, out, columns in (
            ("attn_qkv", 3 * VISION, VISION),
            ("attn_out", VISION, VISION),
            ("ffn_up", VISION_MLP, VISION),
            ("ffn_down", VISION, VISION_MLP),
        ):
            yield Entry(f"{block}.{name}.weight", (out, columns), Type.F16)
            yield Entry(f"{block}.{name}.bias", (out,), Type.F32)
        for norm in ("ln1", "ln2"):
            yield Entry(f"{block}.{norm}.weight", (VISION,), Type.F32)
            yield Entry(f"{block}.{norm}.bias", (VISION,), Type.F32)
    for name, out in (("mm.0", MERGED), ("mm.2", HIDDEN)):
        yield Entry(f"{name}.weight", (out, MERGED), Type.F16)
        yield Entry(f"{name}.bias", (out,), Type.F32)
    yield Entry("v.post_ln.weight", (VISION,), Type.F32)
    yield Entry("v.post_ln.bias", (VISION,), Type.F32)
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        yield Entry(name, (VISION, 3, PATCH, PATCH), Type.F16)
    yield Entry("v.patch_embd.bias", (VISION,), Type.F32)
    yield Entry("v.position_embd.weight", (POSITIONS, VISION), Type.F32)


def write_model(path: Path) -> Path:
    """Write the language model."""
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_name("Headline 27B")
    writer.add_block_count(LAYERS + 1)
    writer.add_context_length(262_144)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(QUERIES)
    writer.add_head_count_kv(KEYS)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(10_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_state_size(GDN_HEAD)
    writer.add_ssm_group_count(GDN_KEYS)
    writer.add_ssm_time_step_rank(GDN_VALUES)
    writer.add_ssm_inner_size(GDN_VALUES * GDN_HEAD)
    writer.add_uint32("qwen35.full_attention_interval", INTERVAL)
    writer.add_rope_dimension_count(HEAD // 4)
    add_vocabulary(writer, VOCABULARY, "qwen35", SPECIAL)
    return write_sparse(writer, path, language_tensors())


def write_projector(path: Path) -> Path:
    """Write the vision projector."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(HIDDEN)
    writer.add_vision_image_size(768)
    writer.add_vision_patch_size(PATCH)
    writer.add_vision_embedding_length(VISION)
    writer.add_vision_feed_forward_length(VISION_MLP)
    writer.add_vision_block_count(VISION_DEPTH)
    writer.add_vision_head_count(VISION_HEADS)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(2)
    writer.add_vision_attention_layernorm_eps(1e-6)
    return write_sparse(writer, path, projector_tensors())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="needs room for the output: about 18 GB")
    parser.add_argument("--to", default="awq")
    parser.add_argument("--tp", default="1,2")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    import gguf2st  # noqa: PLC0415  # after the arguments are known to be right

    arguments.directory.mkdir(parents=True, exist_ok=True)
    model = write_model(arguments.directory / "headline.gguf")
    mmproj = write_projector(arguments.directory / "mmproj-headline.gguf")
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    report = gguf2st.convert(
        model,
        arguments.directory / f"headline-{arguments.to}",
        mmproj=mmproj,
        to=arguments.to,
        tensor_parallel=tuple(int(size) for size in arguments.tp.split(",")),
        threads=arguments.threads,
        force=True,
    )
    after = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "to": report.target,
        "tensors": report.tensors,
        "quantized_matrices": len(report.modules),
        "wall_seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "peak_memory_bytes": after.ru_maxrss * 1024,
        "planned_peak_memory_bytes": report.peak_memory,
        "source_bytes": report.source_bytes,
        "output_bytes": report.total_bytes,
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
