"""Loads checkpoints in SGLang and tells what it leaves unfilled; see `exchange` for input and output.

SGLang has no build of its kernels for CPUs, so nothing is computed. Everything that comes before
is its own: configuration, model class, quantization methods, the weights' loaders. It runs as on one
or more H100s, which `fake_cuda` poses as.
"""

import logging
import os
import socket
import time
import warnings
from typing import Any

from tests.engine_rules.recorders import fake_cuda
from tests.engines.exchange import Job, Result, in_children, serve
from tests.engines.unfilled import STATIC_SCALE, find_unfilled


def run(job: Job) -> Result:
    """Load one checkpoint on each rank, in processes that leave nothing behind for the next one.

    `options` may hold `ranks`, the number of tensor-parallel ranks, and `drafter`, which asks for
    the class that drafts with the checkpoint's MTP block.
    """
    started = time.monotonic()
    ranks = job.options.get("ranks", 1)
    address = f"127.0.0.1:{free_port()}"
    # A fork has all of SGLang imported already.
    loaded = in_children(load, [(job, address, rank) for rank in range(ranks)])
    classes, _ = loaded[0]
    unfilled = [
        f"{text} on rank {rank}" if ranks > 1 else text
        for rank, (_, texts) in enumerate(loaded)
        for text in texts
    ]
    return Result(
        job.name,
        classes=classes,
        loading={"unfilled": unfilled},
        seconds=time.monotonic() - started,
    )


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def load(job: Job, address: str, rank: int) -> tuple[dict[str, str], list[str]]:
    """Load one rank's part; return names of classes, and of parameters that aren't filled."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    unfilled: list[str] = []

    class Loader(DefaultModelLoader):
        """Loads twice, and leaves out what kernels do to the weights afterwards."""

        def load_weights_and_postprocess(
            self, model: Any, weights: Any, target_device: Any
        ) -> None:
            weights = list(weights)
            unfilled.extend(unfilled_by(model, weights, target_device))

    arguments = start(job, address, rank)
    model_config = ModelConfig.from_server_args(
        arguments, is_draft_model=job.options.get("drafter", False)
    )
    loader = Loader(LoadConfig(load_format="safetensors"))
    model = loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu"))
    method = getattr(model, "quant_config", None)
    classes = {"model": type(model).__name__, "quantization": type(method).__name__}
    return classes, unfilled


def start(job: Job, address: str, rank: int) -> Any:
    """What a scheduler does before it loads a model."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    ranks = job.options.get("ranks", 1)
    arguments = ServerArgs(
        model_path=job.directory,
        device="cuda",
        attention_backend="triton",
        dtype=job.dtype,
        disable_cuda_graph=True,
        tp_size=ranks,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    parallel_state.init_distributed_environment(
        backend="gloo",
        world_size=ranks,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://{address}",
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)
    return arguments


def unfilled_by(model: Any, weights: list[tuple[str, Any]], device: Any) -> list[str]:
    """Names of parameters with a part that the weights don't fill."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    weights = [
        (name, 2 * tensor if name.endswith(STATIC_SCALE) else tensor) for name, tensor in weights
    ]
    return find_unfilled(
        model, lambda: DefaultModelLoader.load_weights_only(model, iter(weights), device)
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    fake_cuda.install()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import sglang.srt.model_loader.loader
    import sglang.srt.models.registry  # noqa: F401  # all before the first fork

    serve(run)
