"""Every rule fires on a checkpoint that breaks it, and not on the one that differs in that alone."""

import json
from pathlib import Path

import pytest

import gguf2st
from gguf2st.verification import RULES, Effect
from tests.verification.cases import CASES, Broken
from tests.verification.documenting import DOCUMENT, rules_table
from tests.verification.editing import base, opened

ORDER = list(Effect)


def made(case: Broken, directory: Path, *, broken: bool) -> Path:
    """The good or the broken checkpoint of a case."""
    source = base(*case.base, **case.options)
    edit = opened(source)
    change = case.broken if broken else case.good
    if change is not None:
        change(edit)
    return edit.write(directory, source)


def effects(report: gguf2st.VerifyReport, rule: str) -> dict[str, str]:
    """Engine -> the worst that the rule says about it; notes aside."""
    found: dict[str, Effect] = {}
    for finding in report.of(rule):
        for engine in [finding.engine] if finding.engine else RULES[rule].engines:
            worst = found.get(engine, Effect.NOTE)
            found[engine] = max(worst, finding.effect, key=ORDER.index)
    return {engine: str(effect) for engine, effect in found.items() if effect is not Effect.NOTE}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Broken, tmp_path: Path) -> None:
    good = made(case, tmp_path / "good", broken=False)
    request = dict(case.request)
    if case.broken.__code__.co_code == EMPTY:  # the request makes the difference
        assert not effects(gguf2st.verify(good), case.rule)
    else:
        assert not effects(gguf2st.verify(good, **request), case.rule)
    broken = made(case, tmp_path / "broken", broken=True)
    report = gguf2st.verify(broken, **request)
    assert effects(report, case.rule) == case.expect, report.to_text()


def _nothing() -> None:
    """As a case whose request makes the difference."""


EMPTY = _nothing.__code__.co_code


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            {
                "quantization": {
                    "quant_algo": "NVFP4",
                    "group_size": 16,
                    "exclude_modules": ["lm_head"],
                }
            },
            "",
        ),
        ({"quant_algo": "nvfp4", "ignore": ["lm_head"], "quant_method": "modelopt"}, ""),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, "(quant_algo)"),
        ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}, "(exclude_modules)"),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "(group_size)"),
    ],
)
def test_modelopt_says_it_twice(said: dict[str, object], reason: str, tmp_path: Path) -> None:
    """Both engines read config.json, and hf_quant_config.json where that says nothing."""
    edit = opened(base("llama", "bf16"))
    settings = {"quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    edit.config["quantization_config"] = {"quant_method": "modelopt", **settings}
    directory = edit.write(tmp_path / "one", base("llama", "bf16"))
    (directory / "hf_quant_config.json").write_text(json.dumps(said))
    found = gguf2st.verify(directory).of("D-29")
    assert [f.subjects for f in found] == [("hf_quant_config.json",)] * bool(reason)
    assert all(reason in f.reason and f.effect is Effect.RISK for f in found)
    del edit.config["quantization_config"]
    directory = edit.write(tmp_path / "other", base("llama", "bf16"))
    (directory / "hf_quant_config.json").write_text(json.dumps(said))
    found = gguf2st.verify(directory).of("D-29")
    assert [f.engine for f in found] == ["hf"]


def test_every_rule_has_a_case() -> None:
    shallow = {name for name, rule in RULES.items() if not rule.deep and not rule.against}
    assert shallow == {case.rule for case in CASES}


def test_the_document_has_every_rule() -> None:
    """`python -m tests.engines.test_verdicts` writes the table anew."""
    assert rules_table() in DOCUMENT.read_text()


@pytest.mark.parametrize("tokens", [10, 400_000], ids=["short", "long"])
def test_a_tokenizer_that_ends_early(tokens: int, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.rule == "D-38")
    checkpoint = made(case, tmp_path / "good", broken=False)
    vocabulary = {f"token {number}": number for number in range(tokens)}
    text = json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}})
    file = checkpoint / "tokenizer.json"
    file.write_text(text)
    assert not effects(gguf2st.verify(checkpoint), "D-38")
    file.write_text(text[:-20])
    report = gguf2st.verify(checkpoint)
    assert [f.subjects for f in report.of("D-38") if f.fatal] == [("tokenizer.json",)]
