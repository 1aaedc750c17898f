"""How fast a GPU decodes and quantizes, beside the CPU with one thread and with many.

    python benchmarks/gpu.py [--json results.json] [--quick] [--model model.gguf --folder /tmp/gpu]

Everything is measured in one run on one machine: medians of several rounds, in 10^9 elements
a second, from and to memory of the device (of the host for the CPU). The first call of each
kind, which may compile, is timed by itself.

With a model, it is also converted to some formats, by the CPU and by the GPU, each time in a fresh
process: wall and CPU seconds, and bytes written a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gguf2st.arrays import rounded_to
from gguf2st.buffers import Buffers
from gguf2st.gguf.blocks import (
    BlockType,
    decode_on_device,
    decode_rounded,
    known_block_types,
)
from gguf2st.quantize import (
    IntegerGrid,
    pack_awq,
    pack_nibbles,
    pack_rows,
    quantize_fp8_blocks,
    quantize_fp8_rows,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_rows,
)

COLUMNS = 8192
MANY = min(16, os.cpu_count() or 1)
# Of the types whose CPU rates are measured too; the others decode alike.
USUAL = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "MXFP4")


def integers(bits: int, group: int, symmetric: bool, fit: str, pack: Callable[..., Any]):
    grid = IntegerGrid(bits, group, symmetric, "F16")

    def run(values: Any) -> Any:
        by_square = not 0 < group <= 32
        rows = quantize_rows(values, grid, None, fit, by_square=by_square)
        return pack(rows.codes, bits) if pack is pack_rows else pack(rows.codes)

    return run


FORMATS: dict[str, Callable[[Any], Any]] = {
    "int4 g128 symmetric rtn": integers(4, 128, True, "rtn", pack_rows),
    "int4 g128 rtn": integers(4, 128, False, "rtn", pack_rows),
    "AWQ g128 rtn": integers(4, 128, False, "rtn", pack_awq),
    "int8 g32 rtn": integers(8, 32, True, "rtn", pack_rows),
    "int8 channel rtn": integers(8, 0, True, "rtn", pack_rows),
    "int4 g128 search": integers(4, 128, False, "search", pack_rows),
    "int4 g128 symmetric search": integers(4, 128, True, "search", pack_rows),
    "int4 g32 search": integers(4, 32, False, "search", pack_rows),
    "AWQ g128 search": integers(4, 128, False, "search", pack_awq),
    "int8 g128 search": integers(8, 128, True, "search", pack_rows),
    "int8 channel search": integers(8, 0, True, "search", pack_rows),
    "fp8 channel": lambda values: quantize_fp8_rows(values, "BF16").codes,
    "fp8 block": lambda values: quantize_fp8_blocks(values).codes,
    "mxfp4 rtn": lambda values: pack_nibbles(quantize_mxfp4(values, fit="rtn").codes),
    "mxfp4 search": lambda values: pack_nibbles(quantize_mxfp4(values).codes),
    "nvfp4 rtn": lambda values: pack_nibbles(quantize_nvfp4(values, 2000.0, fit="rtn").codes),
    "nvfp4 search": lambda values: pack_nibbles(quantize_nvfp4(values, 2000.0).codes),
}


def blocks(kind: BlockType, rows: int) -> np.ndarray:
    """Random blocks with scales of a usual size."""
    raw = np.random.default_rng(1).integers(
        0, 256, (rows * COLUMNS // kind.block_size, kind.block_bytes), np.uint8
    )
    for dtype, offset, *_ in (kind.layout.fields or {}).values():
        if dtype == np.float16:
            raw[:, offset + 1] = 0x1C | raw[:, offset + 1] & 0x83
    return raw.reshape(rows, -1)


def weights(rows: int) -> np.ndarray:
    values = np.random.default_rng(2).standard_t(5, (rows, COLUMNS)) * 0.02
    return values.astype(np.float32)


def on_gpu(run: Callable[[], Any], elements: int, rounds: int) -> dict[str, float]:
    """The first call in seconds, and the median rate of later ones."""
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return {"first_s": first, "rate": elements / statistics.median(times) / 1e9}


def on_cpu(run: Callable[[], Any], elements: int, threads: int, rounds: int) -> float:
    """The median rate of so many threads that each do the same."""
    run()
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            started = time.perf_counter()
            for job in [pool.submit(run) for _ in range(threads)]:
                job.result()
            times.append(time.perf_counter() - started)
    return threads * elements / statistics.median(times) / 1e9


def decoding(rows: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in known_block_types():
        raw = blocks(kind, rows if kind.block_size > 1 else rows // 4)
        there = torch.from_numpy(raw).cuda()
        elements = raw.shape[0] * COLUMNS

        def run(kind: BlockType = kind, there: torch.Tensor = there) -> Any:
            return rounded_to(decode_on_device(kind, there, COLUMNS), "BF16")

        found[kind.name] = on_gpu(run, elements, rounds)
        if kind.name in USUAL:
            few = raw[:512]
            buffers = Buffers()

            def here(
                kind: BlockType = kind, few: np.ndarray = few, buffers: Buffers = buffers
            ) -> Any:
                out = buffers.take("out", (len(few), COLUMNS), np.uint16)
                return decode_rounded(kind, few, COLUMNS, "BF16", out)

            for threads in (1, MANY):
                found[kind.name][f"cpu_{threads}"] = on_cpu(
                    here, few.shape[0] * COLUMNS, threads, 3
                )
    return found


def quantizing(rows: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    values, few = torch.from_numpy(weights(rows)).cuda(), weights(256)
    for name, run in FORMATS.items():
        found[name] = on_gpu(lambda run=run: run(values), rows * COLUMNS, rounds)
        for threads in (1, MANY):
            rate = on_cpu(lambda run=run: run(few), few.size, threads, 3)
            found[name][f"cpu_{threads}"] = rate
    return found


def copies() -> dict[str, float]:
    """Pinned copies between host and device, and one on the device, in GB/s."""
    size = 1 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device, other = torch.empty_like(host, device="cuda"), torch.empty_like(host, device="cuda")
    runs = {
        "to_device": lambda: device.copy_(host, non_blocking=True),
        "to_host": lambda: host.copy_(device, non_blocking=True),
        "on_device": lambda: other.copy_(device),
    }
    return {name: on_gpu(run, size, 5)["rate"] for name, run in runs.items()}


def conversion(model: Path, folder: Path, to: str, device: str) -> dict[str, Any]:
    """A whole conversion in a fresh process, the second one, when kernels are compiled."""
    output = folder / f"{to}-{device}"
    command = [sys.executable, "-m", "gguf2st.cli", "convert", str(model), "-o", str(output)]
    command += ["--to", to, "--device", device, "--threads", str(min(8, MANY)), "--force", "--json"]
    found: dict[str, Any] = {}
    for _ in range(2):
        started, before = time.perf_counter(), os.times()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        report = json.loads(process.stdout.read() if process.stdout else "")
        status = process.wait()
        seconds, after = time.perf_counter() - started, os.times()
        written = sum(path.stat().st_size for path in output.iterdir())
        found = {
            "status": status,
            "seconds": seconds,
            "work_seconds": report["seconds"],
            "cpu_seconds": sum(after[2:4]) - sum(before[2:4]),
            "written_GB_s": written / seconds / 1e9,
        }
        shutil.rmtree(output)
    return found


def table(title: str, found: dict[str, Any]) -> None:
    print(f"\n{title:28} GPU    CPU x1  x{MANY:<6} GPU / x{MANY}  first call")
    for name, row in found.items():
        one, many = row.get("cpu_1"), row.get(f"cpu_{MANY}")
        cpu = f"{one:6.3f} {many:7.3f} {row['rate'] / many:8.1f}" if many else " " * 23
        print(f"{name:26} {row['rate']:6.1f} {cpu}   {row['first_s']:8.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small, and one round of each")
    parser.add_argument("--model", type=Path, help="a GGUF to be converted as a whole")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    rows, rounds = (512, 1) if options.quick else (8192, 7)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "copies_GB_s": copies(),
    }
    print(result)
    result["decoding"] = decoding(rows, rounds)
    table("decode to bf16, 10^9/s", result["decoding"])
    result["quantizing"] = quantizing(rows, rounds)
    table("quantize and pack, 10^9/s", result["quantizing"])
    if options.model:
        result["conversions"] = {
            f"{to} {device}": conversion(options.model, options.folder, to, device)
            for to in ("bf16", "awq", "nvfp4")
            for device in ("cpu", "cuda")
        }
        for name, row in result["conversions"].items():
            print(name, {key: round(value, 2) for key, value in row.items()})
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
