"""Speed of decoding and quantizing, beside gguf-py's numpy code and ggml's C code.

    python -m benchmarks.decoding --json benchmarks/decoding.json
    python -m benchmarks.decoding --types Q4_K,Q6_K --rounds 3
    python -m benchmarks.decoding --short              results alone, in seconds

Each type is decoded to float32 and to bfloat16 by all three, in turn, from and to the same warm buffers;
before that, their results are compared bit by bit. One thread; ratios are of its CPU time, so that other
work on the machine counts little. ggml's reference is compiled for this machine (-O3 -march=native).
Then: decoding, rounding to int4 and packing against decoding to bfloat16; the search for scales; and
the speed of more threads against one, by wall time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Run, cores, interleaved, machine, median, ratio, write_json
from gguf2st.gguf.blocks import (
    BlockType,
    PackedRows,
    block_type_by_name,
    decode_rounded,
    decode_rows,
    known_block_types,
)
from gguf2st.quantize import IntegerGrid, pack_awq, pack_rows, quantize_rows
from tests.blocks.samples import assert_same_bits, sound_bytes

COLUMNS = 4096
# Small enough for the second-level cache, where numpy is at its best; the pool's pieces are larger.
ELEMENTS, PIECE = 1 << 18, 1 << 20
LEAST_SECONDS = 0.02
SHORT_TYPES = ("Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "IQ3_S")
PLAIN = ("F32", "F16", "F64", "BF16", "I8", "I16", "I32", "I64")

QUANTIZED = ("Q4_K", "Q6_K", "Q8_0")
# As the formats ask for them: compressed-tensors' default and its finer level, and AWQ.
GRIDS = {
    "ct g128": IntegerGrid(4, 128, True, "BF16"),
    "ct g32": IntegerGrid(4, 32, True, "BF16"),
    "awq g128": IntegerGrid(4, 128, False, "F16"),
    "awq g32": IntegerGrid(4, 32, False, "F16"),
}

Action = Callable[[], object]


class Reference(Protocol):
    """ggml's decoders."""

    def decode(
        self, kind: BlockType, raw: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]
    ) -> None: ...

    def decode_rounded(
        self, kind: BlockType, raw: npt.NDArray[np.uint8], out: npt.NDArray[np.uint16]
    ) -> None: ...


@dataclass(frozen=True)
class Rows:
    """Packed rows of one type with arrays to decode them into."""

    kind: BlockType
    raw: npt.NDArray[np.uint8]
    values: npt.NDArray[np.float32]
    rounded: npt.NDArray[np.uint16]

    @classmethod
    def of(cls, kind: BlockType, elements: int) -> Rows:
        rows = elements // COLUMNS
        raw = sound_bytes(kind, elements // kind.block_size, seed=1).reshape(rows, -1)
        shape = (rows, COLUMNS)
        return cls(kind, raw, np.zeros(shape, np.float32), np.zeros(shape, np.uint16))

    def decode(self) -> npt.NDArray[np.float32]:
        return decode_rows(self.kind, self.raw, COLUMNS, out=self.values)

    def decode_rounded(self) -> npt.NDArray[np.uint16]:
        decode_rounded(self.kind, self.raw, COLUMNS, "BF16", self.rounded)
        return self.rounded

    def quantize(self, grid: IntegerGrid, fit: str) -> npt.NDArray[np.int32]:
        packed = PackedRows(self.kind, self.raw, COLUMNS)
        return quantized(packed if fit == "rtn" else self.decode(), grid, fit)


def quantized(
    values: npt.NDArray[np.float32] | PackedRows, grid: IntegerGrid, fit: str
) -> npt.NDArray[np.int32]:
    """Quantize and pack as the formats do: AWQ transposes, and weights squares above 32 columns."""
    codes = quantize_rows(values, grid, fit=fit, by_square=grid.group_size > 32).codes
    return pack_rows(codes, 4) if grid.symmetric else pack_awq(codes)


def gguf_py(rows: Rows) -> npt.NDArray[np.float32]:
    return gguf.quants.dequantize(rows.raw, gguf.GGMLQuantizationType(rows.kind.code))


def gguf_py_rounded(rows: Rows) -> npt.NDArray[np.uint16]:
    """gguf-py's values, rounded in as few steps as numpy can (its own rounding takes more)."""
    bits = gguf_py(rows).view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    bits += odd
    bits >>= 16
    return bits.astype(np.uint16)


def has_gguf_py(kind: BlockType) -> bool:
    """Whether gguf-py decodes a type."""
    return kind.code in {code.value for code in gguf.quants._type_traits}


def check(rows: Rows, reference: Reference | None) -> list[str]:
    """Compare results bit by bit. Returns who agreed; raises AssertionError."""
    found, rounded = rows.decode().copy(), rows.decode_rounded().copy()
    agreed = []
    if has_gguf_py(rows.kind):
        assert_same_bits(found, gguf_py(rows))
        expected = gguf.quants.quantize(gguf_py(rows), gguf.GGMLQuantizationType.BF16)
        assert np.array_equal(rounded, expected.view(np.uint16))
        assert np.array_equal(rounded, gguf_py_rounded(rows))
        agreed.append("gguf-py")
    if reference is not None:
        reference.decode(rows.kind, rows.raw, rows.values)
        assert_same_bits(found, rows.values)
        reference.decode_rounded(rows.kind, rows.raw, rows.rounded)
        assert np.array_equal(rounded, rows.rounded)
        agreed.append("ggml")
    return agreed


def timed(action: Action, least: float) -> Run:
    """Seconds of one call, from as many calls as take `least` seconds."""
    calls, wall, cpu = 0, time.perf_counter(), time.thread_time()
    while not calls or time.perf_counter() - wall < least:
        action()
        calls += 1
    return {
        "wall": (time.perf_counter() - wall) / calls,
        "cpu": (time.thread_time() - cpu) / calls,
    }


def rates(runs: dict[str, list[Run]], elements: int) -> dict[str, float]:
    """Elements per second of CPU time, for each subject."""
    return {name: elements / max(1e-9, median(found, "cpu")) for name, found in runs.items()}


def decoding(
    kind: BlockType, reference: Reference | None, elements: int, rounds: int, least: float
) -> dict[str, Any]:
    """Rates, ratios and all runs of one type."""
    rows = Rows.of(kind, elements)
    agreed = check(rows, reference)
    subjects: dict[str, Action] = {"f32": rows.decode, "bf16": rows.decode_rounded}
    if "gguf-py" in agreed:
        subjects |= {
            "gguf-py f32": partial(gguf_py, rows),
            "gguf-py bf16": partial(gguf_py_rounded, rows),
        }
    if reference is not None:
        subjects |= {
            "ggml f32": partial(reference.decode, kind, rows.raw, rows.values),
            "ggml bf16": partial(reference.decode_rounded, kind, rows.raw, rows.rounded),
        }
    runs = interleaved(
        {name: partial(timed, action, least) for name, action in subjects.items()}, rounds
    )
    return {
        "equal_bits": agreed,
        "rates": rates(runs, elements),
        "ratios": {
            f"{dtype} / {other}": ratio(runs[f"{other} {dtype}"], runs[dtype], "cpu")
            for other in agreed
            for dtype in ("f32", "bf16")
        },
        "runs": runs,
    }


def quantizing(kind: BlockType, elements: int, rounds: int, least: float) -> dict[str, Any]:
    """Decoding, rounding to the nearest code and packing, against decoding to bfloat16."""
    rows = Rows.of(kind, elements)
    for grid in GRIDS.values():
        assert np.array_equal(rows.quantize(grid, "rtn"), quantized(gguf_py(rows), grid, "rtn"))
    subjects: dict[str, Action] = {"bf16": rows.decode_rounded}
    subjects |= {name: partial(rows.quantize, grid, "rtn") for name, grid in GRIDS.items()}
    runs = interleaved(
        {name: partial(timed, action, least) for name, action in subjects.items()}, rounds
    )
    return {
        "rates": rates(runs, elements),
        "ratios": {f"{name} / bf16": ratio(runs["bf16"], runs[name], "cpu") for name in GRIDS},
        "runs": runs,
    }


def searching(elements: int, rounds: int, least: float) -> dict[str, Any]:
    """The search for scales, with packing: from values at hand, and from Q4_K."""
    values = np.random.default_rng(1).normal(0, 0.02, (elements // COLUMNS, COLUMNS))
    ready = values.astype(np.float32)
    rows = Rows.of(block_type_by_name("Q4_K"), elements)
    subjects: dict[str, Action] = {}
    for name, grid in GRIDS.items():
        subjects[name] = partial(quantized, ready, grid, "search")
        subjects[f"{name} from Q4_K"] = partial(rows.quantize, grid, "search")
    runs = interleaved(
        {name: partial(timed, action, least) for name, action in subjects.items()}, rounds
    )
    return {"rates": rates(runs, elements), "runs": runs}


def threads_to_try() -> list[int]:
    """1, 2, 4, ... and all cores."""
    powers = takewhile(lambda count: count < cores(), (1 << n for n in range(16)))
    return sorted({*powers, cores()})


def scaling(elements: int, rounds: int, least: float) -> dict[str, Any]:
    """What several threads do in the same time as one, each with buffers of its own."""
    found: dict[str, Any] = {}
    counts = threads_to_try()
    for kind, task in (("Q4_K", "bf16"), ("Q6_K", "bf16"), ("Q4_K", "rtn"), ("Q4_K", "search")):
        workers = [Rows.of(block_type_by_name(kind), elements) for _ in range(max(counts))]
        grid = GRIDS["ct g128"]
        actions: list[Action] = [
            rows.decode_rounded if task == "bf16" else partial(rows.quantize, grid, task)
            for rows in workers
        ]
        calls = max(1, int(4 * least / timed(actions[0], least)["wall"]))
        subjects = {str(count): partial(_together, actions[:count], calls) for count in counts}
        runs = interleaved(subjects, rounds)
        found[f"{kind} {task}"] = {
            "elements_per_second": {
                name: int(name) * calls * elements / median(some, "wall")
                for name, some in runs.items()
            },
            "speedup": {
                name: int(name) * ratio(runs["1"], some, "wall") for name, some in runs.items()
            },
            "runs": runs,
        }
    return found


def _together(actions: Sequence[Action], calls: int) -> Run:
    def work(action: Action) -> None:
        for _ in range(calls):
            action()

    with ThreadPoolExecutor(len(actions)) as pool:
        started = time.perf_counter()
        list(pool.map(work, actions))
        return {"wall": time.perf_counter() - started}


def copying(elements: int, rounds: int, least: float) -> dict[str, Any]:
    """Bytes per second of copying an array, read and written: what memory allows."""
    source, target = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    runs = interleaved({"copy": partial(timed, partial(np.copyto, target, source), least)}, rounds)
    return {"bytes_per_second": 8 * elements / median(runs["copy"], "cpu"), "runs": runs}


def measure(
    names: Sequence[str],
    reference: Reference | None,
    *,
    elements: int = ELEMENTS,
    piece: int = PIECE,
    rounds: int = 7,
    least: float = LEAST_SECONDS,
) -> dict[str, Any]:
    """Everything for some types."""
    result: dict[str, Any] = {
        "machine": machine(),
        "elements": elements,
        "rounds": rounds,
        "types": {},
    }
    for name in names:
        kind = block_type_by_name(name)
        result["types"][name] = decoding(kind, reference, elements, rounds, least)
        show(name, result["types"][name])
    result["copy"] = copying(elements, rounds, least)
    result["int4"] = {
        name: quantizing(block_type_by_name(name), elements, rounds, least) for name in QUANTIZED
    }
    for name, found in result["int4"].items():
        show(f"{name} to int4", found)
    result["search"] = searching(elements, rounds, least)
    show("search", result["search"])
    result["threads"] = scaling(piece, rounds, least)
    for name, found in result["threads"].items():
        print(f"{name:14} threads:", {n: round(x, 2) for n, x in found["speedup"].items()})
    result["machine"]["load_after"] = machine().get("load")
    return result


def show(name: str, found: dict[str, Any]) -> None:
    speeds = ", ".join(f"{what} {rate / 1e6:.0f}" for what, rate in found["rates"].items())
    ratios = ", ".join(f"{what} {value:.2f}" for what, value in found.get("ratios", {}).items())
    print(f"{name:14} M/s: {speeds}" + (f"\n{'':14} x: {ratios}" if ratios else ""), flush=True)


def all_names() -> list[str]:
    """Every type with blocks."""
    return [kind.name for kind in known_block_types() if kind.name not in PLAIN]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", help="comma-separated; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help=f"default: {ELEMENTS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs to a file")
    parser.add_argument("--no-ggml", action="store_true", help="needs no C compiler")
    parser.add_argument("--short", action="store_true", help="compare results, hardly measure")
    arguments = parser.parse_args()
    names = arguments.types.upper().split(",") if arguments.types else all_names()
    if arguments.elements < COLUMNS or arguments.elements % COLUMNS:
        raise SystemExit(f"--elements must be a multiple of {COLUMNS}.")
    if arguments.short:
        write_json(arguments.json, short())
        return
    reference = None
    compiler = "none"
    if not arguments.no_ggml:
        from benchmarks.ggml_native import NativeGgml  # noqa: PLC0415  # it compiles

        reference = NativeGgml()
        compiler = reference.compiler
    result = measure(names, reference, elements=arguments.elements, rounds=arguments.rounds)
    result["machine"]["compiler"] = compiler
    write_json(arguments.json, result)


def short(reference: Reference | None = None) -> dict[str, Any]:
    """A few types, small buffers, one round: says whether results are equal, not how fast."""
    return measure(
        SHORT_TYPES, reference, elements=COLUMNS * 16, piece=COLUMNS * 16, rounds=1, least=0
    )


if __name__ == "__main__":
    main()
