"""Trains a small mixture of experts: published ones are too large to be measured here.

    python benchmarks/mixture.py FOLDER [--minutes 6]

A Qwen3.5-MoE of 6 blocks (4 of gated delta nets, 2 of attention), 32 experts of which a token meets 4, and
a shared one; about 95 million weights. It learns the Python sources and documents that lie in this
environment, but nothing of the text that quality is measured on. FOLDER gets `checkpoint/` and
`mixture-Q8_0.gguf`, converted by llama.cpp's own converter. It needs torch, transformers and, to be done in
minutes, a GPU.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

FIXTURES = Path(__file__).parent.parent / "fixtures"
SEED = 7
VOCABULARY, LENGTH = 16384, 1024
KINDS = (".py", ".pyi", ".md", ".rst", ".txt")
# Quality is measured on them.
HELD_OUT = ("pydoc_data", "quality.txt")
END = "<|endoftext|>"


def texts(largest: int, total: int) -> Iterator[str]:
    """Sources and documents of this Python and its packages, in an order that chance gives."""
    paths = sysconfig.get_paths()
    files = sorted({file for key in ("stdlib", "purelib") for file in Path(paths[key]).rglob("*")})
    random.Random(SEED).shuffle(files)
    taken = 0
    for file in files:
        if file.suffix not in KINDS or any(name in str(file) for name in HELD_OUT):
            continue
        try:
            text = file.read_text("utf-8")[:largest]
        except (UnicodeDecodeError, OSError):
            continue
        taken += len(text)
        yield text
        if taken > total:
            return


def tokenizer_of(corpus: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE vocabulary with the pre-tokenization of GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def config_of(end: int) -> Qwen3_5MoeTextConfig:
    """Every width is a multiple of 256, as K-quants want it."""
    return Qwen3_5MoeTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        router_aux_loss_coef=0.01,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=end,
        use_cache=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    )


def rows_of(tokenizer: PreTrainedTokenizerFast, corpus: list[str]) -> torch.Tensor:
    """All texts one after the other, int64 (rows, LENGTH)."""
    end = tokenizer.eos_token_id
    encoded = tokenizer.backend_tokenizer.encode_batch(corpus)
    ids = np.concatenate([np.array([*text.ids, end], np.int32) for text in encoded])
    count = len(ids) // LENGTH
    rows = torch.from_numpy(ids[: count * LENGTH].astype(np.int64)).reshape(count, LENGTH)
    return rows[torch.randperm(count, generator=torch.Generator().manual_seed(SEED))]


class Trainer:
    """AdamW on float32 copies of bfloat16 weights; the rate rises, stays, and falls to nothing at the end."""

    RATE, RISE, FALL = 1.5e-3, 0.05, 0.4

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._weights = list(model.parameters())
        self._copies = [weight.detach().float().requires_grad_() for weight in self._weights]
        matrices = [copy for copy in self._copies if copy.ndim > 1]
        others = [copy for copy in self._copies if copy.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=self.RATE,
            betas=(0.9, 0.95),
        )

    def step(self, rows: torch.Tensor, done: float) -> float:
        """One step on `rows`, int64 (batch, LENGTH), with that share of the time gone; the loss."""
        rate = self.RATE * min(1.0, done / self.RISE, (1 - done) / self.FALL)
        for group in self._optimizer.param_groups:
            group["lr"] = max(rate, 0.0)
        loss = self._model(input_ids=rows, labels=rows, output_router_logits=True).loss
        loss.backward()
        for weight, copy in zip(self._weights, self._copies, strict=True):
            copy.grad, weight.grad = (
                weight.grad.float() if weight.grad is not None else None,
                None,
            )
        torch.nn.utils.clip_grad_norm_(self._copies, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(self._weights, self._copies, strict=True):
                weight.copy_(copy)
        return float(loss.detach())


def train(model: torch.nn.Module, rows: torch.Tensor, minutes: float, batch: int) -> None:
    """Until the time is over."""
    trainer, started, step = Trainer(model), time.monotonic(), 0
    smooth, told = math.nan, started
    while (done := (time.monotonic() - started) / (60 * minutes)) < 1:
        first = step * batch % max(1, len(rows) - batch)
        loss = trainer.step(rows[first : first + batch].to(next(model.parameters()).device), done)
        smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
        step += 1
        if time.monotonic() - told > 15:
            told = time.monotonic()
            print(f"{done:4.0%}  step {step}  loss {smooth:.3f}", flush=True)
    print(f"{step} steps of {batch * LENGTH} tokens, loss {smooth:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--batch", type=int, default=64, help="rows of 1024 tokens in a step")
    parser.add_argument("--megabytes", type=int, default=250, help="of text, at most")
    parser.add_argument("--llama-cpp", help="its source tree (else pip downloads one)")
    arguments = parser.parse_args()
    sys.path.insert(0, str(FIXTURES))
    import llama_tools  # noqa: PLC0415 (a script's neighbour, not a package)

    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = list(texts(100_000, arguments.megabytes * 1_000_000))
    tokenizer = tokenizer_of(corpus[: len(corpus) // 10])
    rows = rows_of(tokenizer, corpus)
    print(f"{len(corpus)} texts, {rows.numel() / 1e6:.0f} million tokens", flush=True)
    model = Qwen3_5MoeForCausalLM(config_of(tokenizer.eos_token_id)).to(device, torch.bfloat16)
    print(f"{sum(w.numel() for w in model.parameters()) / 1e6:.0f} million weights", flush=True)
    train(model, rows, arguments.minutes, arguments.batch)
    checkpoint = arguments.folder / "checkpoint"
    model.config.use_cache = True
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    source = llama_tools.find_source(arguments.llama_cpp, arguments.folder)
    tools = llama_tools.LlamaTools(source, arguments.folder / "build")
    target = arguments.folder / "mixture-Q8_0.gguf"
    tools.convert(checkpoint, target, "gpt-2", ("--outtype", "q8_0", "--no-mtp"))
    print(target)


if __name__ == "__main__":
    main()
