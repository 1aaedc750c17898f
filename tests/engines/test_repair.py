"""What `repair` makes of the checkpoint of tests/verification/test_story.py, vLLM runs.

It generates the tokens that it generates from the dense weights which the *broken* checkpoint stands
for, read by decoders that aren't ours.
"""

import json
from pathlib import Path

from safetensors.torch import save_file

import gguf2st
from tests.conversions import load
from tests.engines.agreement import IDS, NEW_TOKENS, TIMEOUT, check_greedy, loaded
from tests.engines.dequantized import dequantized
from tests.engines.exchange import Job, Prompt, ask
from tests.engines.test_quantized import FEW_TOKENS, TOLERANCE
from tests.verification.test_story import story


def dense(source: Path, target: Path) -> None:
    """The story with all of its quantized matrices rounded to bfloat16."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    quantization = config.pop("quantization_config") | {"ignore": []}
    written = load(source)
    found = dequantized(written, quantization)
    tensors = {name: t if name in written else t.bfloat16() for name, t in found.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    for path in source.glob("*token*"):
        (target / path.name).write_bytes(path.read_bytes())


def test_the_story_runs(tmp_path: Path) -> None:
    broken, mended = story(tmp_path / "broken"), tmp_path / "mended"
    assert gguf2st.repair(broken, mended).right
    dense(broken, tmp_path / "dense")
    jobs = [
        Job(name, str(tmp_path / name), "bfloat16", [Prompt(IDS)], NEW_TOKENS, FEW_TOKENS)
        for name in ("broken", "mended", "dense")
    ]
    results = ask("tests.engines.run_vllm", jobs, tmp_path / "vllm.log", TIMEOUT)
    [said] = [v.message for v in gguf2st.verify(broken, ("vllm",)).verdicts]
    assert said in (results["broken"].error or "")
    [answer], [reference] = (loaded(results[name]).answers for name in ("mended", "dense"))
    check_greedy(answer, reference, TOLERANCE["bfloat16"])
    pairs = zip(answer.prompt_log_probs, reference.prompt_log_probs, strict=True)
    # Dense weights are rounded once more than codes times scales.
    assert max(abs(a - b) for a, b in pairs) <= TOLERANCE["bfloat16"]
