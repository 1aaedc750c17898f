"""Broken checkpoints: each differs from a good one in one thing, and breaks one rule.

What engines do with them is compared with the verdicts in tests/engines/test_verdicts.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.verification.editing import Edit

Change = Callable[[Edit], None]


@dataclass(frozen=True)
class Broken:
    """What to convert, what makes it good (with `base` alone it may be good already), what breaks it.

    `expect` are engines -> effects of the rule's findings. `request` are arguments of verify.
    """

    rule: str
    name: str
    base: tuple[Any, ...]
    broken: Change
    expect: Mapping[str, str]
    good: Change | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    runs: bool = True  # engines are asked, too
    why: str = ""

    def __str__(self) -> str:
        return f"{self.rule}-{self.name}"


CASES: list[Broken] = []


def case(
    rule: str,
    base: tuple[Any, ...],
    expect: Mapping[str, str],
    *,
    good: Change | None = None,
    options: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
    runs: bool = True,
) -> Callable[[Change], Change]:
    """A function that breaks a checkpoint; its docstring says how."""

    def register(change: Change) -> Change:
        CASES.append(
            Broken(
                rule,
                change.__name__.strip("_"),
                base,
                change,
                expect,
                good,
                options or {},
                request or {},
                runs,
                (change.__doc__ or "").strip(),
            )
        )
        return change

    return register


ALL_CRASH = {"vllm": "crash", "sglang": "crash", "hf": "crash"}
ALL_RISK = {"vllm": "risk", "sglang": "risk", "hf": "risk"}
ALL_WRONG = {"vllm": "silently wrong", "sglang": "silently wrong", "hf": "silently wrong"}
LLAMA, QWEN35, QWEN35_MOE, QWEN3_MOE = ("llama",), ("qwen35",), ("qwen35moe",), ("qwen3moe",)
G32 = {"group_size": 32}
LAYER = "model.layers.0"


def keep(edit: Edit, *modules: str, listed: bool = True) -> None:
    """Leave modules unquantized, and list them as exceptions."""
    for module in modules:
        edit.dequantize(module)
    if listed:
        edit.quantization["ignore"] += modules


@case(
    "D-01",
    ("llama", "ct"),
    {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"},
    options=G32,
)
def packed_but_ignored(edit: Edit) -> None:
    """A packed projection is listed in `ignore`."""
    edit.quantization["ignore"].append(f"{LAYER}.mlp.down_proj")


@case(
    "D-01",
    ("qwen35", "ct"),
    {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"},
    options=G32,
)
def packed_but_ignored_in_qwen35(edit: Edit) -> None:
    """Packed projections of a gated delta net are listed in `ignore`."""
    edit.quantization["ignore"] += [
        f"{LAYER}.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_qkvz")
    ]


@case(
    "D-02",
    ("llama", "ct"),
    {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"},
    options=G32,
)
def unpacked_but_not_ignored(edit: Edit) -> None:
    """A projection isn't quantized and not listed either."""
    edit.dequantize(f"{LAYER}.mlp.down_proj")


@case(
    "D-02",
    ("qwen35", "ct"),
    {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"},
    options=G32,
)
def unpacked_but_not_ignored_in_qwen35(edit: Edit) -> None:
    """A projection isn't quantized and not listed either."""
    edit.dequantize(f"{LAYER}.linear_attn.out_proj")


@case(
    "D-04",
    ("qwen3moe", "ct"),
    {"vllm": "crash", "sglang": "crash"},
    good=lambda e: keep(e, *(f"{LAYER}.self_attn.{n}_proj" for n in "qkv")),
)
def shards_partly_ignored(edit: Edit) -> None:
    """Of q, k and v only two are listed."""
    keep(edit, *(f"{LAYER}.self_attn.{n}_proj" for n in "qkv"), listed=False)
    edit.quantization["ignore"] += [f"{LAYER}.self_attn.{n}_proj" for n in "qk"]


@case(
    "D-05",
    ("llama", "ct"),
    {"sglang": "silently wrong"},
    options=G32,
    good=lambda e: keep_fused(e, f"{LAYER}.self_attn.qkv_proj"),
)
def fused_name_not_listed(edit: Edit) -> None:
    """q, k and v are listed, but not qkv_proj, which SGLang's class asks for."""
    keep_fused(edit)


def keep_fused(edit: Edit, *also: str) -> None:
    keep(edit, *(f"{LAYER}.self_attn.{n}_proj" for n in "qkv"))
    edit.quantization["ignore"] += also


@case(
    "D-06",
    ("llama", "ct"),
    {"vllm": "crash", "sglang": "crash"},
    options=G32,
    good=lambda e: second_group(e, "q_proj", "k_proj", "v_proj"),
)
def shards_of_two_schemes(edit: Edit) -> None:
    """q has 8 bits, k and v have 4, and the groups say so."""
    second_group(edit, "q_proj")


def second_group(edit: Edit, *leaves: str, names: str = "") -> None:
    """Modules of layer 0 in 8 bits, and a group for them."""
    for leaf in leaves:
        module = next(m for m in edit.modules(f"{LAYER}.", f".{leaf}."))
        edit.dequantize(module)
        edit.pack(module, bits=8, group=edit.group()["weights"]["group_size"])
    group = copy.deepcopy(edit.group())
    group["weights"]["num_bits"] = 8
    joined = "|".join((*leaves, *(["qkv_proj"] if len(leaves) == 3 else [])))
    group["targets"] = [names or rf"re:.*layers\.0\..*\.({joined})$"]
    edit.quantization["config_groups"]["group_1"] = group


@case(
    "D-07",
    ("llama", "ct"),
    {"vllm": "crash", "sglang": "crash", "hf": "silently wrong"},
    options=G32,
)
def no_target(edit: Edit) -> None:
    """Nothing but the feed-forward part is targeted, and attention is packed, too."""
    edit.group()["targets"] = [r"re:.*\.mlp\..*_proj$"]


@case(
    "D-08",
    ("qwen3moe", "ct"),
    {"sglang": "crash"},
    good=lambda e: second_group(e, "q_proj", "k_proj", "v_proj"),
)
def group_for_parts_alone(edit: Edit) -> None:
    """The second group names q, k and v, but not qkv_proj, so SGLang tries the class first."""
    second_group(edit, "q_proj", "k_proj", "v_proj", names=r"re:.*layers\.0\..*\.(q|k|v)_proj$")


@case("D-03", ("llama", "ct"), ALL_RISK, options=G32, runs=False)
def exceptions_with_another_prefix(edit: Edit) -> None:
    """An exception has the prefix of the multimodal class."""
    edit.quantization["ignore"].append("model.language_model.layers.0.mlp.down_proj")


@case("D-03", ("llama", "ct"), ALL_RISK, options=G32, runs=False)
def exceptions_of_parents(edit: Edit) -> None:
    """An exception names the parent of modules."""
    edit.quantization["ignore"].append(f"{LAYER}.mlp")


@case("D-09", ("qwen35", "ct"), {"sglang": "crash", "vllm": "slower"}, options=G32)
def narrow_projections_packed(edit: Edit) -> None:
    """The 16 rows of in_proj_ba are packed, and SGLang's Marlin needs 64."""
    leave = "linear_attn.in_proj_"
    for name in "ab":
        edit.pack(f"{LAYER}.{leave}{name}")
    edit.quantization["ignore"] = [
        e
        for e in edit.quantization["ignore"]
        if "in_proj_a" not in e and "in_proj_b" not in e and "in_proj_(" not in e
    ]
    assert not any("in_proj" in entry for entry in edit.quantization["ignore"])


@case(
    "D-10",
    ("llama", "ct"),
    {"vllm": "crash", "sglang": "crash"},
    good=lambda e: None,
    options={"group_size": 128},
    request={"tensor_parallel": (1, 2, 4)},
    runs=False,
)
def groups_over_ranks(edit: Edit) -> None:
    """Four ranks would share a group of 128 of 256 columns."""


@case(
    "D-11",
    ("llama", "ct"),
    {"vllm": "crash", "sglang": "crash"},
    options={"symmetric": False, "group_size": 32},
    request={"tensor_parallel": (2,)},
    runs=False,
)
def words_over_ranks(edit: Edit) -> None:
    """Zero points of 36 rows: at two ranks a word would hold those of both."""
    edit.config["intermediate_size"] = 264 * 2 - 8
    for name, columns in (("gate", 256), ("up", 256)):
        for layer in range(2):
            module = f"model.layers.{layer}.mlp.{name}_proj"
            edit.drop(module + ".")
            edit.tensors[f"{module}.weight"] = torch.randn(520, columns).to(torch.float16) * 0.02
            edit.pack(module, asymmetric=True)


@case("D-12", ("llama", "ct"), {"vllm": "crash", "sglang": "crash"}, options=G32, runs=False)
def groups_of_16(edit: Edit) -> None:
    """Groups of 16 columns."""
    for module in [m for m in edit.modules("weight_packed")]:
        edit.dequantize(module)
        edit.pack(module, group=16)
    edit.group()["weights"]["group_size"] = 16


@case(
    "D-13",
    ("llama", "ct"),
    {"vllm": "silently wrong", "sglang": "silently wrong", "hf": "silently wrong"},
    options=G32,
)
def scales_missing(edit: Edit) -> None:
    """A packed projection has no scales."""
    edit.drop(f"{LAYER}.mlp.down_proj.weight_scale")


@case("D-13", ("llama", "ct"), ALL_CRASH | {"hf": "risk"}, options=G32)
def another_group_size_said(edit: Edit) -> None:
    """The config says groups of 64, and the tensors have 32."""
    edit.group()["weights"]["group_size"] = 64


@case(
    "D-13",
    ("llama", "ct"),
    {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"},
    options=G32,
)
def zero_points_unsaid(edit: Edit) -> None:
    """The tensors have zero points, and the config says symmetric."""
    module = f"{LAYER}.mlp.down_proj"
    edit.dequantize(module)
    edit.pack(module, asymmetric=True)


@case(
    "D-15",
    ("llama", "ct"),
    {"vllm": "crash"},
    options={"bits": 8},
    request={"cpu": True},
    runs=False,
)
def eight_bits_on_a_cpu(edit: Edit) -> None:
    """vLLM's build for CPUs has no weight-only integers of 8 bits."""


@case(
    "D-16",
    ("qwen3moe", "ct"),
    {"sglang": "crash", "vllm": "crash"},
    request={"tensor_parallel": (8,)},
    runs=False,
)
def experts_over_ranks(edit: Edit) -> None:
    """Eight ranks would share a group of an expert's down projection."""


@case("D-17", ("qwen3moe", "ct"), {"sglang": "crash"})
def mixed_format_at_the_top(edit: Edit) -> None:
    """The top-level format is mixed-precision, and experts have integers."""
    edit.quantization["format"] = "mixed-precision"


@case("D-17", ("qwen3moe", "ct"), {"sglang": "crash"}, runs=False)
def experts_with_zero_points(edit: Edit) -> None:
    """All matrices have zero points, the experts too."""
    for module in edit.modules("weight_packed"):
        edit.dequantize(module)
        edit.pack(module, group=edit.group()["weights"]["group_size"], asymmetric=True)
    edit.group()["weights"]["symmetric"] = False


@case(
    "D-18",
    ("llama", "ct"),
    {"sglang": "crash"},
    options={"dtype": "f16"},
    request={"compute_capability": 75},
    runs=False,
)
def card_too_old(edit: Edit) -> None:
    """SGLang's schemes of compressed-tensors need compute capability 80."""


@case(
    "D-19",
    ("qwen35moe", "ct"),
    {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"},
)
def router_packed(edit: Edit) -> None:
    """The router of a block is packed."""
    edit.pack(f"{LAYER}.mlp.gate", group=edit.group()["weights"]["group_size"])
    edit.quantization["ignore"] = [
        e for e in edit.quantization["ignore"] if e not in (f"{LAYER}.mlp.gate",)
    ]


@case("D-20", ("qwen35", "bf16"), {"vllm": "risk", "sglang": "risk"}, runs=False)
def drafter_incomplete(edit: Edit) -> None:
    """A norm of the MTP block is missing."""
    edit.drop("mtp.pre_fc_norm_hidden")


@case("D-21", ("qwen35", "gptq"), {"vllm": "risk"}, runs=False)
def gptq_without_dynamic(edit: Edit) -> None:
    """Nothing says that the MTP block isn't quantized."""
    dynamic = edit.quantization["dynamic"]
    edit.quantization["dynamic"] = {k: v for k, v in dynamic.items() if "mtp" not in k}


@case("D-22", ("llama", "bf16"), ALL_WRONG)
def head_missing(edit: Edit) -> None:
    """tie_word_embeddings is false, and there is no output head."""
    edit.drop("lm_head")


@case("D-22", ("llama", "ct"), ALL_WRONG, options=G32)
def head_missing_quantized(edit: Edit) -> None:
    """The same in a quantized checkpoint, where vLLM doesn't look."""
    edit.drop("lm_head")


@case("D-23", ("llama", "bf16"), {"vllm": "crash", "sglang": "risk", "hf": "risk"})
def tensor_left_over(edit: Edit) -> None:
    """A tensor that the class doesn't have."""
    edit.tensors[f"{LAYER}.self_attn.g_norm.weight"] = torch.ones(64, dtype=torch.bfloat16)


@case(
    "D-24", ("llama", "bf16"), {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"}
)
def norm_missing(edit: Edit) -> None:
    """A norm isn't there."""
    edit.drop("layers.1.post_attention_layernorm")


@case("D-24", ("llama", "ct"), ALL_WRONG, options=G32)
def norm_missing_quantized(edit: Edit) -> None:
    """The same in a quantized checkpoint, where vLLM doesn't look."""
    edit.drop("layers.1.post_attention_layernorm")


@case("D-24", ("qwen3moe", "ct"), ALL_WRONG | {"hf": "crash"})
def expert_missing(edit: Edit) -> None:
    """One projection of one expert isn't there."""
    edit.drop("mlp.experts.1.up_proj.")


@case(
    "D-25", ("llama", "bf16"), {"vllm": "silently wrong", "sglang": "silently wrong", "hf": "crash"}
)
def width_of_another_model(edit: Edit) -> None:
    """config.json says another intermediate size."""
    edit.config["intermediate_size"] = 192


@case("D-25", ("llama", "bf16"), ALL_CRASH | {"sglang": "risk"})
def width_of_a_larger_model(edit: Edit) -> None:
    """config.json says a larger intermediate size than the tensors have."""
    edit.config["intermediate_size"] = 320


@case("D-26", ("llama", "bf16"), ALL_RISK, runs=False)
def dtype_of_a_norm(edit: Edit) -> None:
    """A bfloat16 checkpoint has a tensor of float16."""
    name = f"{LAYER}.input_layernorm.weight"
    edit.tensors[name] = edit.tensors[name].to(torch.float16)


@case(
    "D-27", ("llama", "bf16"), {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"}
)
def prefix_of_another_class(edit: Edit) -> None:
    """Names begin as a multimodal class has them."""
    edit.rename(lambda name: name.replace("model.", "model.language_model.", 1))


@case(
    "D-28",
    ("qwen3moe", "ct"),
    {"vllm": "crash", "sglang": "silently wrong", "hf": "silently wrong"},
)
def experts_packed_in_a_stack(edit: Edit) -> None:
    """All experts' codes in one tensor for gate and up, and one for down."""
    path, leaves = f"{LAYER}.mlp.experts", ("weight_packed", "weight_scale")
    count = 1 + max(
        int(name.split(".experts.")[1].split(".")[0]) for name in edit.names(".experts.")
    )
    stacks: dict[str, torch.Tensor] = {}
    for leaf in leaves:
        gate_up = [
            torch.cat([edit.tensors[f"{path}.{e}.{part}_proj.{leaf}"] for part in ("gate", "up")])
            for e in range(count)
        ]
        stacks[f"{path}.gate_up_proj.{leaf}"] = torch.stack(gate_up)
        down = [edit.tensors[f"{path}.{e}.down_proj.{leaf}"] for e in range(count)]
        stacks[f"{path}.down_proj.{leaf}"] = torch.stack(down)
    edit.drop(".experts.")
    edit.tensors |= stacks


@case("D-28", ("qwen3moe", "bf16"), {"sglang": "silently wrong"})
def experts_in_a_stack(edit: Edit) -> None:
    """Unquantized experts in one tensor for gate and up, and one for down, as Qwen3.5's."""
    experts = sorted({name.partition(".experts.")[0] for name in edit.names(".experts.")})
    for block in experts:
        parts = {}
        for part in ("gate", "up", "down"):
            names = [n for n in edit.names(f"{block}.experts.") if f".{part}_proj." in n]
            names.sort(key=lambda name: int(name.split(".experts.")[1].split(".")[0]))
            parts[part] = torch.stack([edit.tensors.pop(name) for name in names])
        gate_up = torch.cat((parts["gate"], parts["up"]), 1)
        edit.tensors[f"{block}.experts.gate_up_proj"] = gate_up
        edit.tensors[f"{block}.experts.down_proj"] = parts["down"]


@case(
    "D-29",
    ("qwen35", "ct"),
    {"sglang": "silently wrong"},
    options={**G32, "mmproj": True},
)
def quantization_config_nested(edit: Edit) -> None:
    """quantization_config is in text_config."""
    edit.config["text_config"]["quantization_config"] = edit.config.pop("quantization_config")


@case("D-30", ("llama", "ct"), ALL_CRASH, options=G32)
def unknown_argument(edit: Edit) -> None:
    """A key that compressed-tensors' arguments don't have."""
    edit.group()["weights"]["rounding"] = "nearest"


@case("D-30", ("llama", "ct"), {"hf": "silently wrong"}, options=G32)
def status_missing(edit: Edit) -> None:
    """quantization_status isn't there."""
    del edit.quantization["quantization_status"]


@case("D-31", ("llama", "awq"), {"vllm": "crash", "sglang": "crash"})
def zero_point_missing(edit: Edit) -> None:
    """zero_point isn't there."""
    del edit.quantization["zero_point"]


@case("D-32", ("qwen35", "awq"), {"vllm": "crash"})
def no_list_of_exceptions(edit: Edit) -> None:
    """modules_to_not_convert is empty: the loose A_log excepts its whole block."""
    edit.quantization["modules_to_not_convert"] = []


@case("D-33", ("llama", "awq"), {"vllm": "crash", "sglang": "silently wrong"})
def exception_in_other_names(edit: Edit) -> None:
    """An exception for a router is the beginning of gate_up_proj."""
    edit.quantization["modules_to_not_convert"].append("mlp.gate")


@case("D-34", ("qwen35", "ct"), {"vllm": "crash"}, options={**G32, "mmproj": True})
def anchored_expression(edit: Edit) -> None:
    """An unquantized module is excepted by an expression for a name that vLLM changes."""
    module = "model.language_model.layers.0.mlp.down_proj"
    edit.dequantize(module)
    edit.quantization["ignore"].append(r"re:^model\.language_model\.layers\.0\.mlp\.down_proj$")


@case("D-34", ("llama", "ct"), ALL_CRASH, options=G32)
def broken_expression(edit: Edit) -> None:
    """An expression with an open bracket."""
    edit.quantization["ignore"].append("re:.*(lm_head$")


@case("D-35", ("llama", "ct"), {"vllm": "crash", "sglang": "silently wrong"}, options=G32)
def head_packed_without_target(edit: Edit) -> None:
    """The output head is packed, and only "Linear" is targeted."""
    edit.pack("lm_head")
    edit.quantization["ignore"] = [e for e in edit.quantization["ignore"] if "lm_head" not in e]


@case("D-36", ("llama", "bf16"), ALL_CRASH, runs=False)
def file_of_the_index_missing(edit: Edit) -> None:
    """The index names a file that isn't there."""
    names = dict.fromkeys(edit.tensors, "model.safetensors")
    first = next(iter(names))
    edit.files["model.safetensors.index.json"] = {
        "metadata": {},
        "weight_map": names | {first: "model-00002-of-00002.safetensors"},
    }


@case("D-37", ("llama", "bf16"), ALL_CRASH)
def header_overlapping(edit: Edit) -> None:
    """Two tensors share their bytes."""
    text = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}  '
    )
    edit.files["model.safetensors"] = len(text).to_bytes(8, "little") + text + bytes(12)


@case("D-38", ("llama", "bf16"), {"vllm": "crash", "sglang": "crash", "hf": "risk"}, runs=False)
def tokenizer_missing(edit: Edit) -> None:
    """There is no tokenizer."""
    edit.files |= {"tokenizer.json": None, "tokenizer_config.json": None}


@case("D-39", ("qwen35", "bf16"), {"vllm": "crash", "sglang": "crash"}, options={"mmproj": True})
def text_model_type(edit: Edit) -> None:
    """text_config has the model_type of the whole."""
    edit.text["model_type"] = "qwen3_5"


@case("D-39", ("qwen35", "bf16"), ALL_CRASH)
def layer_types_too_short(edit: Edit) -> None:
    """layer_types lacks a layer."""
    edit.text["layer_types"] = edit.text["layer_types"][:-1]


@case("D-40", ("qwen35", "bf16"), {"sglang": "crash"})
def interval_missing(edit: Edit) -> None:
    """full_attention_interval isn't there; transformers drops it when it saves."""
    del edit.text["full_attention_interval"]


@case("D-40", ("qwen35", "bf16"), {"sglang": "silently wrong"}, options={"mmproj": True})
def deepstack_missing(edit: Edit) -> None:
    """deepstack_visual_indexes isn't there; transformers drops it when it saves."""
    del edit.config["vision_config"]["deepstack_visual_indexes"]


@case("D-40", ("llama", "bf16"), ALL_WRONG, runs=False)
def size_missing(edit: Edit) -> None:
    """A size isn't there, and a class's default takes its place."""
    del edit.config["num_hidden_layers"]
