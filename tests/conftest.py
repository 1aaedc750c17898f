"""What has to be so before any test imports torch."""

import os

# The tensors here are small: torch's threads wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
