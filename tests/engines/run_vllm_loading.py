"""Loads checkpoints in vLLM without running them; see `exchange` for its input and output.

Configuration, model class, quantization methods, and loaders are vLLM's own; see `reference_kernels` for the rest.
What it needs to serve (caches, warming up) is left out, which takes most of the time.
"""

import os
import time
from typing import Any

from tests.engines.exchange import Job, Result, in_child, serve
from tests.engines.run_sglang import free_port
from tests.engines.run_vllm import ENVIRONMENT
from tests.engines.unfilled import find_unfilled


def run(job: Job) -> Result:
    """Load one checkpoint in a process that leaves nothing behind for the next one."""
    started = time.monotonic()
    architecture, unfilled = in_child(load, job)
    return Result(
        job.name,
        classes={"model": architecture},
        loading={"unfilled": unfilled},
        seconds=time.monotonic() - started,
    )


def load(job: Job) -> tuple[str, list[str]]:
    """Load it; return the class, and the parameters that aren't filled."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        job.directory, dtype=job.dtype, enforce_eager=True, max_model_len=64, **job.options
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{free_port()}", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            model: Any = initialize_model(config)
            loader = DefaultModelLoader(config.load_config)
            unfilled = find_unfilled(model, lambda: loader.load_weights(model, config.model_config))
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return config.model_config.architecture, unfilled


if __name__ == "__main__":
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from tests.engines import reference_kernels

    reference_kernels.register()
    import vllm.model_executor.model_loader  # noqa: F401  # before the first fork

    serve(run)
