"""Lists of exceptions name what is there.

The story that many tell: a Qwen3.5 checkpoint whose `ignore` holds `model.layers.N.linear_attn...` while
its tensors are `model.language_model.layers.N...`; engines start and print garbage. Here every way to
make such a checkpoint is tried, and what the lists say is compared with the tensors that are written.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import gguf2st
from gguf2st.targets import TargetOptions

FIXTURES = Path(__file__).parent.parent / "fixtures"
FORMATS: dict[str, dict[str, Any]] = {
    "awq": {},
    "ct": {},
    "ct mixed": {"mixed": (("self_attn", "int8"), ("down_proj", "int4-g32-asym"))},
    "gptq": {},
    "fp8": {},
    "fp8 block": {"variant": "block"},
    "w8a8": {},
    "mxfp4": {},
    "nvfp4": {},
}
SELECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"keep": (r"layers\.0\..*linear_attn",)},
    {"keep": ("linear_attn.out_proj", r"layers\.1\.mlp\.down_proj")},
    {"keep": ("mlp",)},
    {"quantize": ("lm_head",)},
    {"quantize": (r"^mtp\.",), "keep": ("q_proj",)},
)
# What an engine makes of shards, and may ask for by that name.
JOINED = {
    "qkv_proj": "q_proj",
    "gate_up_proj": "gate_proj",
    "in_proj_qkvz": "in_proj_qkv",
    "in_proj_ba": "in_proj_a",
    "qkv": "q",
}


def entries(config: dict[str, Any]) -> list[str]:
    for key in ("ignore", "modules_to_not_convert"):
        if key in config:
            return list(config[key])
    return [f"re:{key.removeprefix('-:')}" for key in config["dynamic"]]


def targets(config: dict[str, Any]) -> list[str]:
    groups = config.get("config_groups", {}).values()
    return [target for group in groups for target in group["targets"] if target != "Linear"]


def says_something(entry: str, names: set[str], *, loose: bool) -> bool:
    """Whether an entry is the name of a written module, or hits some; `loose` for substrings."""
    if entry.startswith("re:"):
        return any(re.match(entry[3:], name) for name in names)
    return any(entry in name for name in names) if loose else entry in names


@pytest.mark.parametrize("mmproj", [False, True], ids=["text", "vision"])
@pytest.mark.parametrize("drop_mtp", [False, True], ids=["mtp", "no mtp"])
@pytest.mark.parametrize("name", FORMATS)
def test_entries_name_what_is_written(name: str, drop_mtp: bool, mmproj: bool) -> None:
    folder = FIXTURES / "qwen35"
    model = gguf2st.open_model(
        folder / "qwen35-Q4_K_M.gguf", folder / "mmproj-qwen35-f16.gguf" if mmproj else None
    )
    if drop_mtp:
        model = model.without_mtp()
    planned = 0
    for selection, engines in itertools.product(SELECTIONS, (None, ("vllm",), ("hf",))):
        if drop_mtp and "quantize" in selection and selection["quantize"][0].startswith("^mtp"):
            continue
        options = gguf2st.PlanOptions(
            to=name.split(maxsplit=1)[0],
            target=TargetOptions(**FORMATS[name]),
            engines=engines,
            **selection,
        )
        try:
            plan = gguf2st.make_plan(model, options)
        except gguf2st.UnsupportedError:
            continue
        planned += 1
        config = json.loads(plan.documents["config.json"])["quantization_config"]
        tensors = [placement.spec.name for placement in plan.placements]
        written = {tensor.rpartition(".")[0] for tensor in tensors}
        kept = {t.removesuffix(".weight") for t in tensors if t.endswith(".weight")}
        kept -= {module.module.name for module in plan.modules}
        for names in (written, kept):
            for joined, part in JOINED.items():
                names |= {
                    f"{n.removesuffix(part)}{joined}" for n in names if n.endswith(f".{part}")
                }
        loose = name in ("awq", "fp8 block")
        for entry in entries(config):
            assert says_something(entry, kept, loose=loose), (selection, entry)
        for target in targets(config):
            assert says_something(target, written - kept, loose=loose), (selection, target)
    assert planned >= 6
