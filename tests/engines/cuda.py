"""Runs quantized checkpoints in vLLM on a GPU and compares them with what they say they hold.

    python -m tests.engines.cuda [FOLDER] [--json results.json]

Two steps, which may run on two machines with the folder carried between them:

`--prepare` needs no GPU. It converts fixtures to every format, decodes the written tensors with
readers that aren't ours, puts the decoded weights into an unquantized float32 checkpoint and lets
transformers continue the prompts with it on the CPU. That is what an engine has to compute, but for
roundings of activations.

`--run` needs vLLM with its CUDA kernels and nothing of `--prepare`'s packages. Each checkpoint is
loaded in a process of its own, first plainly, then with its MTP block drafting one token.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tests.engines.exchange import REPOSITORY, Answer, Job, Prompt, Result, ask, read_answer

FIXTURES = REPOSITORY / "fixtures"
MMPROJ = FIXTURES / "qwen35" / "mmproj-qwen35-f16.gguf"  # both models have its width
MODELS = {
    "qwen35": FIXTURES / "qwen35" / "qwen35-Q4_K_M.gguf",
    "qwen35moe": FIXTURES / "qwen35moe" / "qwen35moe-Q4_0.gguf",
}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "f16": ("f16", {}),
    "awq-g128-f16": ("awq", {}),
    "gptq-int4-g128": ("gptq", {}),
    "gptq-int8-g128": ("gptq", {"bits": 8}),
    "ct-int4-g128": ("ct", {}),
    "ct-int4-g32-asymmetric": ("ct", {"group_size": 32, "symmetric": False}),
    "ct-int8-g128": ("ct", {"bits": 8}),
    "ct-mixed-int4-g32-int8-g128": ("ct", {"bits": 8, "mixed": (("mlp", "int4-g32"),)}),
    "fp8-channel": ("fp8", {}),
    "fp8-block": ("fp8", {"variant": "block"}),
    "w8a8": ("w8a8", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
}
NEW_TOKENS = 24
IDS = [39, 68, 75, 290, 296, 268, 309, 111, 275, 310, 105, 297, 220, 46, 47, 48]
QUESTION = "What's in 3 pictures?"
IMAGE = "image.png"
OPTIONS: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,  # what is free needn't be measured, while others load too
    "gdn_prefill_backend": "triton",  # needs no more packages
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "skip_mm_profiling": True,
}
DRAFTING = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    "disable_log_stats": False,  # to count the drafts
}
ENVIRONMENT = {
    # Both would compile for minutes: greedy decoding samples nothing, and a warm-up covers more
    # shapes than these prompts have.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}
TIMEOUT = 400.0  # seconds for one checkpoint; the first ones compile kernels


@dataclass(frozen=True)
class Row:
    """The figures of one checkpoint.

    `equal` counts the greedy tokens that are the reference's, up to the first other one of each
    prompt; `gap` is by how much the reference held the most unlikely of those others for less
    likely than its own token, in log-probability. `drafted` and `drafted_gap` compare decoding
    with drafts with decoding without them in the same way.
    """

    name: str
    error: str = ""
    kernels: tuple[str, ...] = ()
    largest: float = 0.0  # difference of a prompt token's log-probability
    median: float = 0.0
    tokens: int = 0
    equal: int = 0
    gap: float = 0.0
    drafts: int = 0
    drafted: int = 0
    drafted_gap: float = 0.0
    drafting_error: str = ""

    def line(self) -> str:
        """One line of the table."""
        if self.error:
            return f"{self.name:38} doesn't load: {last_line(self.error)}"
        drafting = (
            last_line(self.drafting_error)
            or f"{self.drafted:2}/{self.tokens} gap {self.drafted_gap:.4f} of {self.drafts} drafts"
        )
        return (
            f"{self.name:38} {self.largest:.4f} (median {self.median:.4f})"
            f" {self.equal:2}/{self.tokens} gap {self.gap:.4f}  mtp {drafting}"
            f"  {' '.join(self.kernels) or 'unquantized'}"
        )


# --prepare


def prepare(folder: Path, names: Sequence[str]) -> None:
    """Write all checkpoints and what they have to compute into a folder."""
    import gguf2st

    folder.mkdir(parents=True, exist_ok=True)
    draw_image(folder / IMAGE)
    refused, jobs = {}, []
    with tempfile.TemporaryDirectory() as temporary:
        for model, gguf in MODELS.items():
            plain = Path(temporary) / model
            gguf2st.convert(gguf, plain, mmproj=MMPROJ, to="f32")
            for choice, (to, options) in FORMATS.items():
                name = f"{model}-{choice}"
                if names and not any(part in name for part in names):
                    continue
                print("converting", name, file=sys.stderr)
                try:
                    report = gguf2st.convert(
                        gguf,
                        folder / name,
                        mmproj=MMPROJ,
                        to=to,
                        target=gguf2st.TargetOptions(**options),
                        engines=("vllm",) if to not in ("bf16", "f16") else None,
                        force=True,
                    )
                except gguf2st.Gguf2stError as error:
                    refused[name] = str(error)
                    continue
                dense = Path(temporary) / name
                shutil.copytree(plain, dense)
                fill(dense, folder / name, [module.name for module in report.modules])
                jobs.append(Job(name, str(dense), "float32", prompts(folder), NEW_TOKENS))
        log = folder / "transformers.log"
        results = ask("tests.engines.run_transformers", jobs, log, 60.0 * len(jobs))
    failed = {name: result.error for name, result in results.items() if result.error}
    if failed:
        raise SystemExit("\n".join(f"{name}: {error}" for name, error in failed.items()))
    references = {
        name: [asdict(answer) for answer in result.answers] for name, result in results.items()
    }
    (folder / "references.json").write_text(
        json.dumps({"refused": refused, "answers": references}), encoding="utf-8"
    )


def fill(dense: Path, written: Path, modules: Sequence[str]) -> None:
    """Replace all weights of a float32 checkpoint by those of a quantized one, decoded."""
    import pytest
    import torch
    from safetensors.torch import save_file

    from tests.test_requantize import LEAVES, decode, plain_matrix, tensors

    quantization = json.loads((written / "config.json").read_text("utf-8")).get(
        "quantization_config"
    )
    stored = tensors(written)
    with pytest.MonkeyPatch.context() as patch:
        for path in dense.glob("*.safetensors"):
            weights = tensors(dense)
            for name in modules:
                decoded = decode(stored, name, group_of(name, quantization), patch)
                plain_matrix(weights, name)[...] = decoded  # a view of the tensor
            decoded_names = {f"{name}.{leaf}" for name in modules for leaf in LEAVES}
            for name in stored.keys() - decoded_names:
                if name in weights:
                    weights[name].copy_(stored[name])
                else:
                    part = plain_matrix(weights, name.removesuffix(".weight"))
                    torch.from_numpy(part).copy_(stored[name])
            save_file(weights, path, metadata={"format": "pt"})


def group_of(name: str, quantization: dict[str, Any]) -> dict[str, Any]:
    """The configuration with no other group than the module's, by compressed-tensors' matching."""
    if len(quantization.get("config_groups", ())) < 2:
        return quantization
    import torch
    from compressed_tensors.utils.match import is_match

    linear = torch.nn.Linear(1, 1)
    groups = quantization["config_groups"].values()
    # Names win over classes.
    named = [
        g for g in groups if is_match(name, linear, [t for t in g["targets"] if t != "Linear"])
    ]
    [group] = named or [g for g in groups if "Linear" in g["targets"]]
    return quantization | {"config_groups": {"group_0": group}}


def prompts(folder: Path) -> list[Prompt]:
    """Token ids, a chat, and a chat with an image."""
    text = {"type": "text", "text": QUESTION}
    image = {"type": "image", "path": str(folder / IMAGE)}
    contents: list[Any] = [QUESTION, [image, text]]
    return [
        Prompt(IDS),
        *(Prompt(messages=[{"role": "user", "content": content}]) for content in contents),
    ]


def draw_image(path: Path) -> None:
    """Draw colour gradients with stripes."""
    import numpy as np
    from PIL import Image

    rows, columns = np.indices((96, 128))
    stripes = (rows + columns) // 16 % 2 * 255
    Image.fromarray(np.stack([rows * 2, columns * 2, stripes], -1).astype(np.uint8)).save(path)


# --run


def run(folder: Path, names: Sequence[str], processes: int) -> list[Row]:
    """Run all checkpoints of a folder, several at a time."""
    prepared = json.loads((folder / "references.json").read_text("utf-8"))
    rows = [Row(name, error=f"refused: {why}") for name, why in prepared["refused"].items()]
    wanted = [
        (name, [read_answer(answer) for answer in answers])
        for name, answers in prepared["answers"].items()
        if not names or any(part in name for part in names)
    ]
    with ThreadPoolExecutor(processes) as pool:
        running = [pool.submit(run_one, folder, *pair) for pair in wanted]
        for done in as_completed(running):
            print(done.result().line(), flush=True)
    return rows + [done.result() for done in running]


def run_one(folder: Path, name: str, references: list[Answer]) -> Row:
    """Load one checkpoint in a process of its own, plainly and with its MTP block."""
    # dtype "auto" is what config.json says.
    plain = Job(name, str(folder / name), "auto", prompts(folder), NEW_TOKENS, OPTIONS)
    drafting = replace(plain, name=f"{name}-mtp", options=OPTIONS | DRAFTING)
    log = folder / f"{name}.log"
    try:
        results = ask("tests.engines.run_vllm", [plain, drafting], log, TIMEOUT, shim=False)
    except subprocess.TimeoutExpired as error:
        return Row(name, error=str(error))
    return figures(name, references, results[plain.name], results[drafting.name])


def figures(name: str, references: list[Answer], plain: Result, drafting: Result) -> Row:
    """Compare what vLLM computed with the references."""
    if plain.error:
        return Row(name, error=plain.error)
    differences: list[float] = []
    for ours, theirs in zip(plain.answers, references, strict=True):
        if ours.ids != theirs.ids:
            return Row(name, error=f"the prompt became {ours.ids}, not {theirs.ids}")
        pairs = zip(ours.prompt_log_probs, theirs.prompt_log_probs, strict=True)
        differences += [abs(a - b) for a, b in pairs]
    equal, gap = compare(plain.answers, references)
    drafted, drafted_gap = compare(drafting.answers, plain.answers)
    return Row(
        name,
        kernels=tuple(plain.kernels),
        largest=max(differences),
        median=median(differences),
        tokens=sum(len(answer.tokens) for answer in references),
        equal=equal,
        gap=gap,
        drafts=drafting.drafts,
        drafted=drafted,
        drafted_gap=drafted_gap,
        drafting_error=drafting.error or "",
    )


def compare(answers: list[Answer], others: list[Answer]) -> tuple[int, float]:
    """Count equal tokens up to the first difference of each answer; later ones have other prefixes.

    Beside it, by how much the others held the different token for less likely than theirs.
    """
    equal, gap = 0, 0.0
    for answer, other in zip(answers, others, strict=False):
        for step, (ours, theirs) in enumerate(zip(answer.tokens, other.tokens, strict=True)):
            if ours != theirs:
                candidates = other.candidates[step]
                gap = max(gap, candidates[theirs] - candidates.get(ours, float("-inf")))
                break
            equal += 1
    return equal, gap


def last_line(error: str) -> str:
    """What a traceback ends with."""
    return error.strip().rpartition("\n")[2]


def machine() -> dict[str, str]:
    """What the figures belong to."""
    from importlib.metadata import version

    import torch

    found = {package: version(package) for package in ("vllm", "torch", "transformers")}
    return found | {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda or ""}


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="default: a temporary one")
    parser.add_argument("--prepare", action="store_true", help="only this step")
    parser.add_argument("--run", action="store_true", help="only this step")
    parser.add_argument("--only", nargs="*", default=[], help="parts of checkpoints' names")
    parser.add_argument("--processes", type=int, default=2, help="checkpoints run at a time")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        if not arguments.run:
            prepare(folder, arguments.only)
        if arguments.prepare:
            return
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        rows = run(folder, arguments.only, arguments.processes)
    result = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    print(json.dumps(result["machine"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    if any(row.error or row.drafting_error for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
