"""Our shape rules against the engines' own, and the rules that can't be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gguf2st.engines import ENGINES, Deployment, Kind, Matrix
from gguf2st.targets.base import Scheme
from tests.engine_rules.recorders.shape_cases import blocks, experts, integers

Recording = Callable[[str], dict[str, Any]]
VLLM, SGLANG, HF = ENGINES["vllm"], ENGINES["sglang"], ENGINES["hf"]
INT4 = Scheme("int", 4, 128)
BLOCK = Scheme("fp8", 8, 128, block_rows=128, activation_bits=8)
CHANNEL = Scheme("fp8", 8, 0, activation_bits=8)
CT = "compressed-tensors"


def _shapes(recorded: dict[str, Any], kind: str) -> str:
    return "".join(recorded["shapes"][kind])


def _deployment(case: Any) -> Deployment:
    return Deployment((case.ranks,), case.capability or None, case.capability == 0, case.dtype)


def test_vllm_integer_kernels(recording: Recording) -> None:
    """Every kernel choice of vLLM's own chooser, on four GPUs and the CPU."""
    letters, asked = _shapes(recording("vllm"), "integers"), 0
    for case, letter in zip(integers(), letters, strict=True):
        scheme = Scheme("int", case.bits, case.group_size, case.symmetric)
        if not case.symmetric and case.rows % (32 // case.bits):
            continue  # words of zero points, which the chooser doesn't look at
        deployment = _deployment(case)
        matrix = Matrix("down_proj", Kind.ROW, (case.rows,), case.columns * case.ranks)
        refused = VLLM.target_refusal("LlamaForCausalLM", CT, scheme, deployment)
        verdict = VLLM.verdict(matrix, CT, scheme, deployment)
        ours = "-" if refused or verdict.refusal else "y"
        assert ours == ("-" if letter == "-" else "y"), (case, refused, verdict)
        if letter in "ET" and ours == "y":
            assert "slow" in " ".join(verdict.notes)
        asked += 1
    assert asked > 5000


def test_sglang_marlin_shapes(recording: Recording) -> None:
    """Its check wants 64 x 128; the kernels also take 128 x 64."""
    letters = _shapes(recording("sglang"), "integers")
    for case, letter in zip(integers(), letters, strict=True):
        if not (case.bits == 4 and case.symmetric and case.group_size in (0, 32, 64, 128)):
            continue
        scheme = Scheme("int", 4, case.group_size)
        matrix = Matrix("down_proj", Kind.ROW, (case.rows,), case.columns * case.ranks)
        verdict = SGLANG.verdict(matrix, CT, scheme, Deployment((case.ranks,)))
        other = case.rows % 128 == 0 and case.columns % 128 == 64
        if not other:
            assert bool(verdict.refusal) is (letter == "-"), case


@pytest.mark.parametrize(
    ("engine", "kind"), [("vllm", "blocks"), ("sglang", "blocks")], ids=["vllm", "sglang"]
)
def test_fp8_blocks(engine: str, kind: str, recording: Recording) -> None:
    letters = _shapes(recording(engine), kind)
    for case, letter in zip(blocks(), letters, strict=True):
        split = Kind.ROW if case.by_columns else Kind.MERGED
        matrix = Matrix("x", split, case.rows, case.columns)
        verdict = ENGINES[engine].verdict(matrix, "fp8", BLOCK, Deployment((case.ranks,)))
        assert bool(verdict.refusal) is (letter == "-"), (case, verdict)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_experts(engine: str, recording: Recording) -> None:
    """What Marlin doesn't take goes to slower kernels in vLLM, if its groups are whole."""
    letters = _shapes(recording(engine), "experts")
    for case, letter in zip(experts(), letters, strict=True):
        matrix = Matrix("x", Kind.EXPERTS, (case.inner, case.inner), case.hidden)
        scheme = Scheme("int", 4, case.group_size)
        verdict = ENGINES[engine].verdict(matrix, CT, scheme, Deployment())
        if letter == "-" and engine == "vllm":
            assert verdict.refusal or verdict.notes, case
        elif case.hidden % (case.group_size or 1) == 0:
            assert bool(verdict.refusal) is (letter == "-"), (case, verdict)


def test_groups_must_lie_within_a_rank() -> None:
    down = Matrix("mlp.down_proj", Kind.ROW, (2048,), 512)
    for engine in (VLLM, SGLANG):
        assert not engine.verdict(down, CT, INT4, Deployment((1, 2, 4))).refusal
        reason = engine.verdict(down, CT, INT4, Deployment((1, 2, 4, 8))).refusal
        assert "at tensor parallel 8" in reason
        assert "groups of 128" in reason


def test_delta_net_of_qwen35_27b() -> None:
    """48 + 48 rows: SGLang's Marlin asserts, vLLM pads since mid-2026."""
    ba = Matrix("model.layers.0.linear_attn.in_proj_ba", Kind.MERGED, (48, 48), 5120)
    assert "96 rows" in SGLANG.verdict(ba, CT, INT4, Deployment()).refusal
    verdict = VLLM.verdict(ba, CT, INT4, Deployment((1, 2)))
    assert not verdict.refusal
    assert "pads" in verdict.notes[0]
    # For AWQ vLLM keeps it whole on each rank: 12 rows of each part at 4 ranks would not do.
    awq = VLLM.verdict(ba, "awq", INT4, Deployment((4,)))
    assert not awq.refusal
    assert "words" in VLLM.verdict(ba, "awq", INT4, Deployment((4,), cpu=True)).refusal


def test_heads_of_k_and_v_are_repeated() -> None:
    qkv = Matrix("qkv_proj", Kind.QKV, (4096, 512, 512), 4096, head=128)
    part = qkv.per_rank(8)
    assert part is not None
    assert part.rows == (512, 128, 128)


def test_packed_words_of_awq() -> None:
    merged = Matrix("qkv_proj", Kind.MERGED, (128, 4), 128)
    for engine in (VLLM, SGLANG):
        assert "words" in engine.verdict(merged, "awq", INT4, Deployment()).refusal


def test_vllm_on_a_cpu_has_no_experts_in_groups_of_32() -> None:
    """Tried: "No WNA16 MoE backend supports the deployment configuration"."""
    experts = Matrix("experts", Kind.EXPERTS, (256, 256), 256)
    for group, refused in ((128, False), (32, True)):
        scheme = Scheme("int", 4, group)
        assert bool(VLLM.verdict(experts, CT, scheme, Deployment(cpu=True)).refusal) == refused
        assert not VLLM.verdict(experts, CT, scheme, Deployment()).refusal


def test_sglang_falls_back_for_awq_only() -> None:
    narrow = Matrix("o_proj", Kind.ROW, (96,), 128)
    assert SGLANG.verdict(narrow, CT, INT4, Deployment()).refusal
    assert SGLANG.verdict(narrow, "awq", INT4, Deployment()).notes


def test_qwen3_next_loader_of_sglang() -> None:
    matrix = Matrix("in_proj_qkvz", Kind.MERGED, (2048,) * 4, 2048, only_weight="a reason")
    assert "a reason" in SGLANG.verdict(matrix, CT, INT4, Deployment()).refusal
    assert not SGLANG.verdict(matrix, "fp8", BLOCK, Deployment()).refusal


@pytest.mark.parametrize(
    ("engine", "method", "scheme", "deployment", "experts", "expected"),
    [
        ("vllm", "w4afp8", INT4, Deployment(), False, "no quantization method"),
        ("hf", "w4afp8", INT4, Deployment(), False, "no quantization method"),
        ("sglang", "w4afp8", INT4, Deployment(compute_capability=80), True, "90"),
        ("sglang", "w4afp8", INT4, Deployment(compute_capability=90), True, ""),
        ("sglang", CT, INT4, Deployment(compute_capability=75, dtype="float16"), False, "80"),
        ("sglang", "gptq", INT4, Deployment(compute_capability=75, dtype="float16"), False, "80"),
        ("sglang", "awq", INT4, Deployment(compute_capability=75, dtype="float16"), False, ""),
        ("sglang", "awq", INT4, Deployment(compute_capability=75, dtype="float16"), True, "80"),
        ("vllm", CT, INT4, Deployment(compute_capability=75, dtype="float16"), False, ""),
        ("vllm", CT, INT4, Deployment(compute_capability=75), False, "float16"),
        ("vllm", CT, INT4, Deployment(compute_capability=70, dtype="float16"), False, "75"),
        ("vllm", CT, Scheme("mxfp4", 4, 32), Deployment(compute_capability=75), False, "80"),
        ("sglang", CT, Scheme("mxfp4", 4, 32), Deployment(), False, "MXFP4"),
        ("vllm", CT, Scheme("int", 8, 128), Deployment(cpu=True), False, "8 bits"),
        ("vllm", CT, INT4, Deployment(cpu=True), False, ""),
        ("vllm", CT, Scheme("nvfp4", 4, 16), Deployment(cpu=True), False, "nvfp4"),
        ("vllm", CT, CHANNEL, Deployment(cpu=True), True, "blocks only"),
        ("sglang", CT, INT4, Deployment(cpu=True), False, "build of its own"),
        ("sglang", CT, Scheme("int", 4, 128, symmetric=False), Deployment(), True, "zero points"),
        ("sglang", CT, Scheme("int", 4, 128, symmetric=False), Deployment(), False, ""),
        ("sglang", CT, Scheme("int", 8, 0, activation_bits=8), Deployment(), True, "NPUs"),
        ("hf", CT, Scheme("int", 4, 128, symmetric=False), Deployment(), True, "zero points"),
        ("hf", CT, Scheme("int", 4, 128, symmetric=False), Deployment(), False, ""),
        ("hf", "awq", INT4, Deployment(), True, "random"),
        ("hf", CT, Scheme("int", 8, 0, activation_bits=8), Deployment(), True, "int8 experts"),
        ("vllm", "gptq", Scheme("int", 4, 128, symmetric=False), Deployment(), False, "symmetric"),
    ],
)
def test_what_an_engine_takes_at_all(
    engine: str, method: str, scheme: Scheme, deployment: Deployment, experts: bool, expected: str
) -> None:
    reason = ENGINES[engine].target_refusal(
        "LlamaForCausalLM", method, scheme, deployment, experts=experts
    )
    assert (expected in reason) if expected else not reason


def test_what_sglang_fails_to_load_into_one_class_only() -> None:
    def refusal(model_class: str, method: str, scheme: Scheme) -> str:
        return SGLANG.target_refusal(model_class, method, scheme, Deployment(), experts=True)

    assert "drops the scales" in refusal("LlamaForCausalLM", "fp8", BLOCK)
    assert not refusal("LlamaForCausalLM", CT, CHANNEL)
    assert not refusal("MixtralForCausalLM", "fp8", BLOCK)
    assert "replaces Mixtral" in refusal("MixtralForCausalLM", "w4afp8", INT4)
    assert not refusal("Qwen3MoeForCausalLM", "w4afp8", INT4)


def test_notes_tell_what_is_slower() -> None:
    old = Deployment(compute_capability=80)
    assert "16-bit" in VLLM.target_notes(CT, CHANNEL, old)[0]
    assert "Marlin" in SGLANG.target_notes(CT, Scheme("nvfp4", 4, 16), old)[0]
    assert "gptqmodel" in HF.target_notes("awq", INT4, Deployment())[0]
    assert not VLLM.target_notes(CT, INT4, Deployment())
