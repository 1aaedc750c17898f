"""Loads checkpoints in vLLM and continues prompts; see `exchange` for its input and output."""

import base64
import gc
import os
import time
from pathlib import Path
from typing import Any

from tests.engines.exchange import Answer, Job, Prompt, Result, in_child, serve

ENVIRONMENT = {
    # Where the processor has AMX, vLLM would quantize activations to 8 bits before 4-bit weights.
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding is slow on a machine that does other work
    "VLLM_CONFIGURE_LOGGING": "0",  # a second each time, for one logger among thousands
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in this process: quicker, plain tracebacks
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # What `enforce_eager` leaves to compile, as the ranks of log-probabilities, runs as it is written.
    "TORCH_COMPILE_DISABLE": "1",
}
KV_CACHE = 1 << 28  # bytes
CANDIDATES = 5


def run(job: Job) -> Result:
    """Load one checkpoint and continue its prompts, in a process that ends with that."""
    result: Result = in_child(load_and_continue, job)
    return result


def prepare() -> None:
    """Do once what each engine would do when it starts; forks have it from here."""
    import vllm.entrypoints.llm  # noqa: F401  # before the first fork
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    # Looks at every attribute of every module.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)


def load_and_continue(job: Job) -> Result:
    """Do a job, and free nothing."""
    from vllm import LLM

    # vLLM thaws and collects what was imported, too: seconds each time.
    gc.unfreeze = gc.collect = lambda *_: 0  # type: ignore[assignment,misc]
    started = time.monotonic()
    llm = LLM(
        job.directory,
        dtype=job.dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=2,
        kv_cache_memory_bytes=KV_CACHE,
        **job.options,
    )
    answers = [continue_prompt(llm, prompt, job.new_tokens) for prompt in job.prompts]
    classes = {
        "model": llm.llm_engine.model_config.architecture,
        "tokenizer": type(llm.get_tokenizer()).__name__,
    }
    return Result(
        job.name,
        answers,
        classes,
        kernels=sorted(set().union(*llm.apply_model(kernels))),
        drafts=0 if job.options.get("disable_log_stats", True) else count_drafts(llm),
        seconds=time.monotonic() - started,
    )


def continue_prompt(llm: Any, prompt: Prompt, new_tokens: int) -> Answer:
    """Generate greedily after token ids, text or chat messages."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=CANDIDATES,
        prompt_logprobs=0,  # of the prompt's own tokens only
    )
    if prompt.ids is not None:
        requests = [{"prompt_token_ids": prompt.ids}]
        [output] = llm.generate(requests, sampling, use_tqdm=False)
    elif prompt.text is not None:
        [output] = llm.generate([prompt.text], sampling, use_tqdm=False)
    else:
        messages = [with_data_urls(message) for message in prompt.messages or []]
        [output] = llm.chat(messages, sampling, use_tqdm=False)
    ids, [completion] = output.prompt_token_ids, output.outputs
    following = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    return Answer(
        ids=list(ids),
        prompt_log_probs=[step[token].logprob for token, step in following],
        tokens=list(completion.token_ids),
        candidates=[
            {token: entry.logprob for token, entry in step.items()} for step in completion.logprobs
        ],
        text=completion.text,
    )


def kernels(model: Any) -> set[str]:
    """Classes that compute the quantized layers of a loaded model."""
    found = set()
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        name = type(method).__name__
        if method is None or name.startswith("Unquantized") or name.endswith("KVCacheMethod"):
            continue
        parts = {**vars(method), **vars(getattr(layer, "scheme", None) or object)}
        names = {type(part).__name__ for part in parts.values() if hasattr(part, "apply_weights")}
        if experts := parts.get("experts_cls"):
            names.add(experts.__name__)
        # A method without a kernel of its own computes by itself.
        found |= {name for name in names if "Kernel" in name or "Experts" in name} or {
            type(parts.get("scheme", method)).__name__
        }
    return found


def count_drafts(llm: Any) -> int:
    """How many times the drafter was asked; needs `disable_log_stats=False`."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return int(metrics["vllm:spec_decode_num_drafts"].value)


def with_data_urls(message: dict[str, Any]) -> dict[str, Any]:
    """Put a message's images in the form that clients of a server send."""
    if isinstance(message["content"], str):
        return message
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            data = base64.b64encode(Path(part["path"]).read_bytes()).decode()
            url = {"url": f"data:image/png;base64,{data}"}
            parts.append({"type": "image_url", "image_url": url})
        else:
            parts.append(part)
    return message | {"content": parts}


if __name__ == "__main__":
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from tests.engines import reference_kernels

    reference_kernels.register()
    prepare()
    serve(run)
