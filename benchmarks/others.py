"""What gguf2st's conversions are compared with; `conversion.py` runs each in a process of its own.

python -m benchmarks.others write OUTPUT BYTES [BYTES ...]     files of random bytes, and fsync
python -m benchmarks.others gguf-py MODEL OUTPUT               GGUFReader, dequantize, save_file
python -m benchmarks.others transformers MODEL OUTPUT          from_pretrained, save_pretrained
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

BUFFER = 8 << 20


def write(output: Path, *sizes: int) -> None:
    """What the disk alone takes: large writes from one buffer, then fsync."""
    output.mkdir()
    buffer = memoryview(os.urandom(BUFFER))
    for number, size in enumerate(sizes):
        with (output / f"{number}.bin").open("wb", buffering=0) as file:
            for start in range(0, size, BUFFER):
                file.write(buffer[: size - start])
            os.fsync(file.fileno())


def gguf_py(model: Path, output: Path) -> None:
    """The usual script: every tensor decoded and rounded to bfloat16, then all written at once."""
    import gguf  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    output.mkdir()
    tensors = {}
    for tensor in gguf.GGUFReader(model).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # Unquantized tensors are views of the mapped file, which torch warns of unless they are copied.
        values = values if values.flags.writeable else values.copy()
        tensors[tensor.name] = torch.from_numpy(values).to(torch.bfloat16)
    save_file(tensors, output / "model.safetensors")


def transformers(model: Path, output: Path) -> None:
    """transformers' own way from a GGUF to a checkpoint."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    loaded = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.bfloat16
    )
    # It refuses to save what it calls a quantized model, though every weight is bfloat16 by now.
    loaded.hf_quantizer = None
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    loaded.save_pretrained(output)


def main() -> None:
    name, *arguments = sys.argv[1:]
    if name == "write":
        write(Path(arguments[0]), *map(int, arguments[1:]))
    elif name == "gguf-py":
        gguf_py(*map(Path, arguments))
    elif name == "transformers":
        transformers(*map(Path, arguments))
    else:
        raise SystemExit(f"{name!r} is none of write, gguf-py, transformers")


if __name__ == "__main__":
    main()
