"""Time of `gguf2st verify` on checkpoints of a large model's size, whose data are holes in files.

    python benchmarks/verify.py [--runs 5] [--directory DIR] [--json results.json]
    python benchmarks/verify.py --against model.gguf CHECKPOINT...

Headers, config.json and index are those of a Qwen3.5 text model with 64 blocks: unquantized (866
tensors), with packed 4-bit integers, and a mixture of 256 experts, one tensor for each. Every run is
a new process, so that starting Python counts.

With `--against`, how long comparing checkpoints with the GGUF that they were made of takes: what
`verify --against` takes longer than `verify`, and weights in each second of it and of processor time.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}
SHARD = 4 << 30
HIDDEN, WIDTH, LAYERS, VOCABULARY, HEAD = 3072, 11008, 64, 248320, 256
HEADS, PAIRS, KEYS, VALUES, LINEAR_HEAD = 16, 4, 16, 32, 128
GROUP = 128
Tensors = dict[str, tuple[str, tuple[int, ...]]]
KEPT = ("in_proj_a", "in_proj_b", "mtp.", "mlp.gate.", "shared_expert_gate")


def attention(block: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{block}self_attn.q_proj.weight": (2 * HEADS * HEAD, HIDDEN),
        f"{block}self_attn.k_proj.weight": (PAIRS * HEAD, HIDDEN),
        f"{block}self_attn.v_proj.weight": (PAIRS * HEAD, HIDDEN),
        f"{block}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{block}self_attn.q_norm.weight": (HEAD,),
        f"{block}self_attn.k_norm.weight": (HEAD,),
    }


def delta_net(block: str) -> dict[str, tuple[int, ...]]:
    keys, values, path = KEYS * LINEAR_HEAD, VALUES * LINEAR_HEAD, f"{block}linear_attn."
    return {
        f"{path}in_proj_qkv.weight": (2 * keys + values, HIDDEN),
        f"{path}in_proj_z.weight": (values, HIDDEN),
        f"{path}in_proj_b.weight": (VALUES, HIDDEN),
        f"{path}in_proj_a.weight": (VALUES, HIDDEN),
        f"{path}out_proj.weight": (HIDDEN, values),
        f"{path}conv1d.weight": (2 * keys + values, 1, 4),
        f"{path}A_log": (VALUES,),
        f"{path}dt_bias": (VALUES,),
        f"{path}norm.weight": (LINEAR_HEAD,),
    }


def feed_forward(path: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{path}gate_proj.weight": (width, HIDDEN),
        f"{path}up_proj.weight": (width, HIDDEN),
        f"{path}down_proj.weight": (HIDDEN, width),
    }


def mixture(block: str, experts: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        f"{block}mlp.gate.weight": (experts, HIDDEN),
        f"{block}mlp.shared_expert_gate.weight": (1, HIDDEN),
    }
    found |= feed_forward(f"{block}mlp.shared_expert.", 512)
    for expert in range(experts):
        found |= feed_forward(f"{block}mlp.experts.{expert}.", 512)
    return found


def parameters(experts: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the unquantized model."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    blocks = [(f"model.layers.{i}.", (i + 1) % 4 != 0) for i in range(LAYERS)]
    for block, linear in [*blocks, ("mtp.layers.0.", False)]:
        found |= delta_net(block) if linear else attention(block)
        found |= mixture(block, experts) if experts else feed_forward(f"{block}mlp.", WIDTH)
        found |= {
            f"{block}{n}.weight": (HIDDEN,) for n in ("input_layernorm", "post_attention_layernorm")
        }
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    found |= {f"mtp.{name}.weight": (HIDDEN,) for name in norms}
    return found | {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}


def quantized(dense: dict[str, tuple[int, ...]]) -> Tensors:
    """Linear layers as packed 4-bit integers."""
    found: Tensors = {}
    for name, shape in dense.items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "in_proj_qkv", "in_proj_z")) or any(
            k in name for k in KEPT
        ):
            found[name] = ("F32" if "A_log" in name else "BF16", shape)
            continue
        out, columns = shape
        found[f"{module}.weight_packed"] = ("I32", (out, columns // 8))
        found[f"{module}.weight_scale"] = ("BF16", (out, columns // GROUP))
        found[f"{module}.weight_shape"] = ("I64", (2,))
    return found


def config(experts: int, packed: bool) -> dict[str, Any]:
    name = "Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"
    found: dict[str, Any] = {
        "architectures": [name],
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "num_attention_heads": HEADS,
        "num_key_value_heads": PAIRS,
        "head_dim": HEAD,
        "linear_num_key_heads": KEYS,
        "linear_num_value_heads": VALUES,
        "linear_key_head_dim": LINEAR_HEAD,
        "linear_value_head_dim": LINEAR_HEAD,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "layer_types": [
            "full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(LAYERS)
        ],
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "num_experts": experts,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    if packed:
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": GROUP,
        }
        leaves = r"re:.*\.(in_proj_(a|b|ba)|gate|shared_expert_gate)$"
        found["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["re:.*lm_head$", r"re:^mtp\..*", leaves],
        }
    return found


def write(directory: Path, tensors: Tensors, settings: dict[str, Any]) -> int:
    """Shards whose data are holes; returns their bytes."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = total = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BYTES[dtype]
        if filled + size > SHARD:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape)
        filled += size
        total += size
    places = {}
    for number, members in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        position, header = 0, {}
        for name, (dtype, shape) in members.items():
            stop = position + math.prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, stop]}
            places[name], position = file, stop
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + position)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).write_text('{"chat_template": ""}')
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("checkpoints", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.against is not None:
        compare(arguments.checkpoints, arguments.against, arguments.runs, arguments.json)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        results = [
            measure(Path(folder) / name, experts, packed, arguments.runs)
            for name, experts, packed in (
                ("bf16", 0, False),
                ("int4", 0, True),
                ("experts", 256, True),
            )
        ]
    for result in results:
        print(
            "{name:8} {tensors:6} tensors {gigabytes:6.1f} GB  {median:.2f} s, of the processor "
            "{processor:.2f} s".format(**result)
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


def measure(directory: Path, experts: int, packed: bool, runs: int) -> dict[str, Any]:
    directory.mkdir()
    dense = parameters(experts)
    tensors = (
        quantized(dense)
        if packed
        else {name: ("F32" if "A_log" in name else "BF16", shape) for name, shape in dense.items()}
    )
    total = write(directory, tensors, config(experts, packed))
    seconds, processor = times(["verify", str(directory)], runs)[:2]
    return {
        "name": directory.name,
        "tensors": len(tensors),
        "gigabytes": total / 1e9,
        "median": statistics.median(seconds),
        "processor": statistics.median(processor),
        "all": seconds,
    }


def times(arguments: list[str], runs: int) -> tuple[list[float], list[float], str]:
    """Seconds and those of the processor of each run of the command, and what the last one printed."""
    seconds: list[float] = []
    processor: list[float] = []
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = used.ru_utime + used.ru_stime
    for _ in range(runs):
        started = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-m", "gguf2st.cli", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds.append(time.perf_counter() - started)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(used.ru_utime + used.ru_stime - before)
        before += processor[-1]
        if run.returncode:
            raise SystemExit(run.stdout + run.stderr)
    return seconds, processor, run.stdout


def compare(checkpoints: list[Path], model: Path, runs: int, results: Path | None) -> None:
    found = []
    for checkpoint in checkpoints:
        command = ["verify", str(checkpoint), "--json"]
        against = [*command, "--against", str(model)]
        times(against, 1)  # compiles, and brings the files into the system's cache
        alone = [statistics.median(each) for each in times(command, runs)[:2]]
        *both, printed = times(against, runs)
        weights = sum(tensor["values"] for tensor in json.loads(printed)["against"]["tensors"])
        wall, processor = (
            statistics.median(each) - less for each, less in zip(both, alone, strict=True)
        )
        found.append(
            {
                "name": checkpoint.name,
                "weights": weights,
                "seconds": wall,
                "processor": processor,
                "all": both,
            }
        )
        print(
            f"{checkpoint.name:12} {weights / 1e6:7.0f} M weights  {wall:.2f} s, "
            f"{weights / wall / 1e6:.0f} M/s; {weights / processor / 1e6:.0f} M in a second of a thread"
        )
    if results:
        results.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
