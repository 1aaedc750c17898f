"""How one matrix is quantized: what formats, engines and checks all talk about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """How one matrix is quantized.

    `kind` is "int" (codes with a scale), "fp8", "mxfp4" or "nvfp4". `group_size`
    columns share a scale; 0 means the whole row, and `block_rows` > 1 means a
    block of that many rows by `group_size` columns does. `activation_bits` is 16
    where activations stay as they are. `stacked` codes are those of all experts of a
    block in one tensor.
    """

    kind: str
    bits: int
    group_size: int
    symmetric: bool = True
    block_rows: int = 1
    activation_bits: int = 16
    stacked: bool = False

    @property
    def needs_maximum(self) -> bool:
        """Whether encoding needs the largest magnitude of all fused partners beforehand."""
        return self.kind == "nvfp4"

    @property
    def same_blocks(self) -> str:
        """The GGUF type whose blocks hold the very codes and scales of this scheme; "" if none."""
        return {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}.get(self.kind, "")

    def __str__(self) -> str:
        rows = f"{self.block_rows}x" if self.block_rows > 1 else ""
        group = f" g{rows}{self.group_size}" if self.group_size else " per channel"
        activations = f" a{self.activation_bits}" if self.activation_bits < 16 else ""
        asymmetric = "" if self.symmetric else " asymmetric"
        name = f"int{self.bits}" if self.kind == "int" else self.kind
        stacked = " stacked" if self.stacked else ""
        return f"{name}{asymmetric}{group}{activations}{stacked}"
