"""Unquantized fixtures come back as the checkpoints that they were converted from."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import gguf2st
from tests.conversions import KEPT_FLOAT32, Case, cases, converted, load, one_per_folder
from tests.oracles.gguf_rewrite import Tensor, rewrite_all
from tests.oracles.inverse import File
from tests.oracles.originals import original_state_dict

Weights = dict[str, torch.Tensor]

# By the class that the original's config.json names: every family that has a mapping table.
FAMILIES = {
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}
EXACT = [case for case in cases() if case.exact]

VISION = re.compile(r"model\.visual\.|vision_tower\.|multi_modal_projector\.")
BF16 = 30  # enum ggml_type
# The converter itself joins those that have FFN_GATE_UP_EXP in gguf-py: qwen3next, qwen35moe.
JOINED_EXPERTS = ("qwen2moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen35moe")
# SigLIP's pooling head takes no part in Gemma 3; the converter leaves it out (gemma.py).
UNUSED = re.compile(r"vision_tower\.(vision_model\.)?head\.")
ROOTS = re.compile(r"model\.language_model\.|language_model\.model\.")


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_comes_back_bit_for_bit(case: Case) -> None:
    expected = expected_tensors(case)
    written = load(converted(case))
    assert written.keys() == expected.keys()
    wrong = [name for name in expected if not comes_back(name, written[name], expected[name])]
    assert not wrong


def comes_back(name: str, written: torch.Tensor, original: torch.Tensor) -> bool:
    dtype = torch.float32 if name.endswith(KEPT_FLOAT32) else torch.bfloat16
    if (written.dtype, written.shape) != (dtype, original.shape):
        return False
    if name.endswith("A_log"):
        # Stored as -exp(A_log) in float32. Rounding the exponential moves the logarithm by up to
        # 2**-24, rounding the logarithm by up to 2**-23 (|A_log| < 4).
        close = (written - original.float()).abs().max() <= 3 * 2**-24
        return bool(close) and torch.equal(written.bfloat16(), original.bfloat16())
    # All originals are bfloat16 numbers, and so chosen that 1 + norm is exact (fixtures/weights.py).
    return torch.equal(written.float(), original.float())


def expected_tensors(case: Case) -> Weights:
    """The original tensors that the files of a case hold, under the names they should get."""
    tensors = _decode_nvfp4(decode_mxfp4(original_state_dict(case.folder)))
    tensors = {n: t for n, t in tensors.items() if not UNUSED.match(n)}
    if not case.has_mtp:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}
    model_class = original_class(case)
    if model_class == "Qwen3_5MoeForConditionalGeneration":
        tensors = _fuse_experts(tensors)
    if case.mmproj is None:
        # Without its vision tower the model is the text model, whose decoder is `model`.
        tensors = {ROOTS.sub("model.", n): t for n, t in tensors.items() if not VISION.match(n)}
        if model_class == "Qwen3VLMoeForConditionalGeneration":
            tensors = _as_qwen3_moe(tensors)
    return tensors


def decode_mxfp4(tensors: Weights) -> Weights:
    """gpt-oss's packed experts as transformers has them in memory: (expert, in, out)."""
    result = {name: t for name, t in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            exponents = tensors[f"{stem}_scales"].int() - 127
            values = torch.ldexp(_e2m1(blocks), exponents.unsqueeze(-1)).flatten(-2)
            result[stem] = values.mT.contiguous().to(torch.bfloat16)
    return result


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Two numbers of each byte, the low four bits first: a sign, two bits of exponent, one of mantissa."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    return numbers[codes & 7] * (1 - 2 * (codes >> 3))


def _decode_nvfp4(tensors: Weights) -> Weights:
    """ModelOpt's packed weights as numbers."""
    result = {}
    for name, packed in tensors.items():
        if packed.dtype == torch.uint8:
            values = _e2m1(packed)
            scale = tensors[f"{name}_scale"].float().repeat_interleave(16, dim=-1)
            result[name] = (values * scale * tensors[f"{name}_scale_2"]).to(torch.bfloat16)
        elif not name.endswith(("_scale", "_scale_2")):
            result[name] = packed
    return result


def _fuse_experts(tensors: Weights) -> Weights:
    """The trunk of published Qwen3.5 MoE models has fused experts, the MTP block fused ones or not.

    transformers saves them one by one. A GGUF can't tell which it was.
    """
    result, stacks = {}, defaultdict(list)
    for name, value in tensors.items():
        found = re.fullmatch(r"(.*mlp\.experts\.)\d+\.(gate|up|down)_proj\.weight", name)
        if found:
            stacks[found[1], found[2]].append(value)
        else:
            result[name] = value
    for prefix, kind in stacks:
        experts = torch.stack(stacks[prefix, kind])
        if kind == "down":
            result[f"{prefix}down_proj"] = experts
        elif kind == "gate":
            result[f"{prefix}gate_up_proj"] = torch.cat(
                [experts, torch.stack(stacks[prefix, "up"])], dim=1
            )
    return result


def _as_qwen3_moe(tensors: Weights) -> Weights:
    """The text part of Qwen3-VL-MoE is Qwen3-MoE, whose experts are stored one by one."""
    result = {}
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        for number, expert in enumerate(value if module.endswith("mlp.experts") else ()):
            parts = (
                {"gate": expert.chunk(2, dim=-1)[0], "up": expert.chunk(2, dim=-1)[1]}
                if leaf == "gate_up_proj"
                else {"down": expert}
            )
            for kind, part in parts.items():
                result[f"{module}.{number}.{kind}_proj.weight"] = part.T
        if not module.endswith("mlp.experts"):
            result[name] = value
    return result


@pytest.mark.parametrize(
    "case",
    [case for case in one_per_folder(EXACT) if "NVFP4" not in File(case.model).kinds.values()],
    ids=str,
)
def test_tensors_joined_by_the_converter_are_taken_apart(case: Case, tmp_path: Path) -> None:
    """The converter's --fuse-qkv and --fuse-gate-up-exps, for every family."""
    joined = tmp_path / "joined.gguf"
    architecture = File(case.model).key("general.architecture")
    rewrite_all(case.model, joined, partial(join, architecture in JOINED_EXPERTS))
    gguf2st.convert(joined, tmp_path / "converted")
    written, expected = load(tmp_path / "converted"), load(converted(case))
    assert written.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(written[name], expected[name])]


def test_qwen3_next_files_of_2025_keep_the_fused_projection(tmp_path: Path) -> None:
    """Before attn_qkv and attn_gate there was ssm_in: the checkpoint's in_proj_qkvz as it is."""
    (case,) = (case for case in one_per_folder(EXACT) if case.folder.name == "qwen3next-small")
    originals = original_state_dict(case.folder)

    def use_ssm_in(tensors: list[Tensor]) -> list[Tensor]:
        blocks = {t.name.removesuffix("ssm_out.weight") for t in tensors if "ssm_out" in t.name}
        taken = {
            block + leaf for block in blocks for leaf in ("attn_qkv.weight", "attn_gate.weight")
        }
        result = [tensor for tensor in tensors if tensor.name not in taken]
        for block in blocks:
            number = block.split(".")[1]
            fused = originals[f"model.layers.{number}.linear_attn.in_proj_qkvz.weight"]
            data = fused.view(torch.int16).numpy().tobytes()
            result.append(Tensor(f"{block}ssm_in.weight", fused.shape[::-1], BF16, data))
        return result

    rewrite_all(case.model, tmp_path / "old.gguf", use_ssm_in)
    gguf2st.convert(tmp_path / "old.gguf", tmp_path / "converted")
    written, expected = load(tmp_path / "converted"), load(converted(case))
    assert written.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(written[name], expected[name])]


def join(join_experts: bool, tensors: list[Tensor]) -> list[Tensor]:
    by_name = {tensor.name: tensor for tensor in tensors}
    for name in list(by_name):
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".attn_q"):
            parts = [by_name.pop(f"{stem[:-1]}{letter}.{kind}") for letter in "qkv"]
            rows = [part.shape[-1] for part in parts]
            by_name[f"{stem}kv.{kind}"] = replace(
                parts[0],
                name=f"{stem}kv.{kind}",
                shape=(*parts[0].shape[:-1], sum(rows)),
                data=b"".join(part.data for part in parts),
            )
        elif stem.endswith(".ffn_gate_exps") and join_experts:
            joined = name.replace("gate", "gate_up")
            gate, up = by_name.pop(name), by_name.pop(name.replace("gate", "up"))
            width, rows, count = gate.shape
            halves = [np.frombuffer(part.data, np.uint8).reshape(count, -1) for part in (gate, up)]
            data = np.concatenate(halves, axis=1).tobytes()
            by_name[joined] = replace(gate, name=joined, shape=(width, 2 * rows, count), data=data)
    return list(by_name.values())


def original_class(case: Case) -> str:
    return json.loads((case.folder / "config.json").read_text("utf-8"))["architectures"][0]


# --- is there anything to test? ------------------------------------------------------------------


def test_every_family_has_exact_and_quantized_fixtures() -> None:
    assert {original_class(case) for case in EXACT} >= FAMILIES
    # Mistral differs from Llama by its class alone, and Gemma 3's two classes by the mmproj.
    once = FAMILIES - {"MistralForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"}
    assert {original_class(case) for case in cases() if not case.exact} >= once


def test_every_form_of_a_file_is_among_the_fixtures() -> None:
    forms = {form for case in EXACT for form in _forms(case)}
    assert forms == {
        "alone",
        "big-endian",
        "experts apart",
        "fused experts",
        "fused qkv",
        "GGUF v2",
        "mmproj",
        "MTP file",
        "MTP inside",
        "shards",
        "tied",
        "trunk of a model with MTP",
    }


def _forms(case: Case) -> set[str]:
    file = File(case.model)
    names = file.kinds.keys()
    originals = original_state_dict(case.folder)
    mtp_in_original = any(name.startswith("mtp.") for name in originals)
    forms = {
        "big-endian": file.byte_order == "S",
        "experts apart": "blk.0.ffn_gate.0.weight" in names,
        "fused experts": any("ffn_gate_up_exps" in name for name in names),
        "fused qkv": any(
            f"blk.{number}.attn_qkv.weight" in names and f"blk.{number}.ssm_out.weight" not in names
            for number in range(4)
        ),
        "GGUF v2": file.key("GGUF.version") == 2,
        "mmproj": case.mmproj is not None,
        "MTP file": case.mtp is not None,
        "MTP inside": case.has_mtp and case.mtp is None,
        "shards": file.key("split.count", 1) > 1,
        "tied": "output.weight" not in names,
        "trunk of a model with MTP": mtp_in_original and not case.has_mtp,
    }
    return {name for name, present in forms.items() if present} or {"alone"}
