"""Loads checkpoints in transformers and continues prompts; see `exchange` for its input and output."""

import time
from typing import Any

import torch
import transformers as hf
from PIL import Image

from tests.engines.exchange import Answer, Job, Prompt, Result, serve

CANDIDATES = 5


def run(job: Job) -> Result:
    """Load one checkpoint and continue its prompts."""
    started = time.monotonic()
    multimodal = hasattr(hf.AutoConfig.from_pretrained(job.directory), "vision_config")
    model_class = hf.AutoModelForImageTextToText if multimodal else hf.AutoModelForCausalLM
    model, loading = model_class.from_pretrained(
        job.directory, dtype=getattr(torch, job.dtype), output_loading_info=True, **job.options
    )
    # Sampling defaults of the checkpoint aside: a stop token may be generated like any other.
    model.generation_config = hf.GenerationConfig()
    tokenizer = hf.AutoTokenizer.from_pretrained(job.directory)
    processor = hf.AutoProcessor.from_pretrained(job.directory) if multimodal else tokenizer
    answers = [continue_prompt(model, processor, prompt, job.new_tokens) for prompt in job.prompts]
    return Result(
        job.name,
        answers,
        classes={
            "model": type(model).__name__,
            "tokenizer": type(tokenizer).__name__,
            "processor": type(processor).__name__,
        },
        loading={kind: sorted(map(str, keys)) for kind, keys in loading.items()},
        seconds=time.monotonic() - started,
    )


@torch.inference_mode()
def continue_prompt(model: Any, processor: Any, prompt: Prompt, new_tokens: int) -> Answer:
    """Generate greedily after token ids, text or chat messages."""
    if prompt.ids is not None:
        inputs = {"input_ids": torch.tensor([prompt.ids])}
    elif prompt.text is not None:
        inputs = processor(text=prompt.text, return_tensors="pt")
    else:
        inputs = processor.apply_chat_template(
            [with_images(message) for message in prompt.messages or []],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    ids = inputs["input_ids"][0]
    log_probs = model(**inputs).logits[0].float().log_softmax(-1)
    generated = model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = generated.sequences[0, len(ids) :]
    candidates = []
    for logits in generated.logits:
        likeliest = logits[0].float().log_softmax(-1).topk(CANDIDATES)
        candidates.append(
            dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
        )
    return Answer(
        ids=ids.tolist(),
        prompt_log_probs=log_probs[:-1].gather(1, ids[1:, None])[:, 0].tolist(),
        tokens=tokens.tolist(),
        candidates=candidates,
        text=processor.decode(tokens, skip_special_tokens=True),
    )


def with_images(message: dict[str, Any]) -> dict[str, Any]:
    """Open a message's images; left to itself, transformers decodes files with torchvision."""
    if isinstance(message["content"], str):
        return message
    parts = [
        {"type": "image", "image": Image.open(part["path"])} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return message | {"content": parts}


if __name__ == "__main__":
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    serve(run)
