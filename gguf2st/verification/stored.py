"""What the tensors of a checkpoint say about each matrix: quantized how, of which shape.

Nothing here looks at names of layers, and little at the configuration: layouts are told by
their leaves ("qweight", "weight_packed") and dtypes, schemes by ratios of shapes.
Sources of the layouts: AutoAWQ modules/linear/gemm.py, GPTQModel nn_modules/qlinear,
compressed_tensors/compressors/*/base.py, transformers integrations/finegrained_fp8.py,
mxfp4.py, SGLang's w4afp8.py and modelopt_quant.py (`ModelOptFp4LinearMethod`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gguf2st.scheme import Scheme
from gguf2st.verification.header import Tensor

FLOATS = frozenset({"F32", "F16", "BF16", "F64"})
FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
# Leaves that only quantized matrices have.
PACKED = "weight_packed"
CODES = frozenset({"I8", "U8"}) | FP8
COMPANIONS = frozenset(
    {
        "weight_packed",
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
    }
)
_STACKED = ("_blocks", "_scales")


class Layout(StrEnum):
    """How a matrix is stored."""

    DENSE = "unquantized"
    PACKED = "pack-quantized"
    NVFP4 = "nvfp4"
    MODELOPT = "modelopt nvfp4"
    MXFP4 = "mxfp4"
    CODES = "one byte a weight"
    HALF_BYTES = "w4afp8"
    AWQ = "awq"
    GPTQ = "gptq"
    STACKED = "stacked mxfp4"
    BROKEN = "incomplete"


@dataclass(frozen=True)
class Stored:
    """A matrix: `leaves` are its tensors by the last part of their names.

    `shape` (out, in) is of one matrix, of a stack without the number of matrices.
    `scheme` is None for unquantized ones, and where shapes don't tell.
    Widths of activations aren't in the tensors; they are 16 here.
    """

    name: str
    layout: Layout
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    shape: tuple[int, int] = (0, 0)
    scheme: Scheme | None = None

    @property
    def quantized(self) -> bool:
        """Whether it holds codes."""
        return self.layout is not Layout.DENSE

    @property
    def tensors(self) -> tuple[str, ...]:
        """Full names of its tensors."""
        return tuple(tensor.name for tensor in self.leaves.values())


@dataclass(frozen=True)
class Hints:
    """What shapes alone can't tell: the bits, symmetry and group sizes that the configuration names.

    `columns` are numbers of inputs that the model class has for a module. A matrix with one
    group may have one scale for a row whatever the groups, or be just as wide as a group.
    """

    method: str = ""
    bits: int = 4
    symmetric: bool = True
    groups: frozenset[int] = frozenset()
    columns: Mapping[str, int] = field(default_factory=dict)


def stored_matrices(tensors: Iterable[Tensor], hints: Hints) -> dict[str, Stored]:
    """All matrices by their module's name; vectors, convolutions and norms aren't among them."""
    grouped: dict[str, dict[str, Tensor]] = {}
    alone: dict[str, Tensor] = {}
    for tensor in tensors:
        parent, _, leaf = tensor.name.rpartition(".")
        if leaf == "weight" or leaf in COMPANIONS:
            grouped.setdefault(parent, {})[leaf] = tensor
        elif leaf.endswith(_STACKED):
            base, _, kind = tensor.name.rpartition("_")
            grouped.setdefault(base, {})[kind] = tensor
        elif len(tensor.shape) == 3:
            alone[tensor.name] = tensor
    found = {}
    for name, leaves in grouped.items():
        matrix = _matrix(name, leaves, hints)
        if matrix is not None:
            found[name] = matrix
    for name, tensor in alone.items():
        shape = tensor.shape[-2], tensor.shape[-1]
        found[name] = Stored(name, Layout.DENSE, {"": tensor}, shape)
    return found


def _matrix(name: str, leaves: dict[str, Tensor], hints: Hints) -> Stored | None:
    if set(leaves) == {"weight"}:
        weight = leaves["weight"]
        if len(weight.shape) != 2:
            return None
        if weight.dtype in FLOATS:
            return Stored(name, Layout.DENSE, leaves, _pair(weight.shape))
        return Stored(name, Layout.BROKEN, leaves, _pair(weight.shape))
    for reader in (_awq_or_gptq, _packed, _codes, _stacked):
        matrix = reader(name, leaves, hints)
        if matrix is not None:
            return matrix
    return Stored(name, Layout.BROKEN, leaves)


def _awq_or_gptq(name: str, leaves: dict[str, Tensor], hints: Hints) -> Stored | None:
    """AWQ packs outputs, (in, out / p) and (in / g, out / p); GPTQ inputs, (in / p, out)."""
    codes, scales = leaves.get("qweight"), leaves.get("scales")
    if codes is None or scales is None or len(codes.shape) != 2 or len(scales.shape) != 2:
        return None
    groups, out = scales.shape
    if hints.method == "gptq" or (hints.method != "awq" and codes.shape[1] == out):
        columns = codes.shape[0] * 32 // max(1, hints.bits)
        bits, layout, symmetric = hints.bits, Layout.GPTQ, hints.symmetric
    else:
        bits = 32 * codes.shape[1] // max(1, out)
        columns, layout, symmetric = codes.shape[0], Layout.AWQ, False
    scheme = Scheme("int", bits, _group(columns, groups, hints), symmetric)
    return Stored(name, layout, leaves, (out, columns), scheme)


def _packed(name: str, leaves: dict[str, Tensor], hints: Hints) -> Stored | None:
    codes, scale = leaves.get("weight_packed"), leaves.get("weight_scale")
    if codes is None or scale is None or len(codes.shape) != 2 or len(scale.shape) != 2:
        return None
    out, words = _pair(codes.shape)
    groups = scale.shape[1]
    if codes.dtype == "U8":
        kind = "nvfp4" if scale.dtype in FP8 or "weight_global_scale" in leaves else "mxfp4"
        layout = Layout.NVFP4 if kind == "nvfp4" else Layout.MXFP4
        return Stored(
            name,
            layout,
            leaves,
            (out, 2 * words),
            Scheme(kind, 4, _group(2 * words, groups, hints)),
        )
    known = hints.columns.get(name)
    bits = 32 * words // known if known else hints.bits
    columns = known or 32 * words // max(1, hints.bits)
    scheme = Scheme("int", bits, _group(columns, groups, hints), "weight_zero_point" not in leaves)
    return Stored(name, Layout.PACKED, leaves, (out, columns), scheme)


def _codes(name: str, leaves: dict[str, Tensor], hints: Hints) -> Stored | None:
    codes = leaves.get("weight")
    if codes is None or codes.dtype not in CODES or len(codes.shape) != 2:
        return None
    out, columns = _pair(codes.shape)
    scale = leaves.get("weight_scale_inv", leaves.get("weight_scale"))
    if scale is None:
        return None
    if codes.dtype == "U8" and "weight_scale_2" in leaves and len(scale.shape) == 2:
        scheme = Scheme("nvfp4", 4, _group(2 * columns, scale.shape[1], hints))
        return Stored(name, Layout.MODELOPT, leaves, (out, 2 * columns), scheme)
    if codes.dtype in ("I8", "U8") and "weight_scale_inv" in leaves:
        scheme = Scheme("int", 4, _group(2 * columns, scale.shape[-1] if scale.shape else 1, hints))
        return Stored(name, Layout.HALF_BYTES, leaves, (out, 2 * columns), scheme)
    kind = "fp8" if codes.dtype in FP8 else "int"
    if (len(scale.shape) == 2 and scale.shape[1] > 1) or "weight_scale_inv" in leaves:
        rows, across = (*scale.shape, 1, 1)[:2]
        block = _block(out, rows)
        scheme = Scheme(kind, 8, _block(columns, across), block_rows=block)
    else:
        scheme = Scheme(kind, 8, 0)
    return Stored(name, Layout.CODES, leaves, (out, columns), scheme)


def _stacked(name: str, leaves: dict[str, Tensor], hints: Hints) -> Stored | None:
    """(experts, out, in / 32, 16) codes and (experts, out, in / 32) scales."""
    blocks, scales = leaves.get("blocks"), leaves.get("scales")
    if blocks is None or scales is None or len(blocks.shape) != 4:
        return None
    _, out, groups, size = blocks.shape
    shape = (out, groups * size * 2)
    return Stored(name, Layout.STACKED, leaves, shape, Scheme("mxfp4", 4, 2 * size, stacked=True))


def _group(columns: int, groups: int, hints: Hints) -> int:
    if groups > 1:
        return columns // groups
    return columns if columns in hints.groups else 0


def _block(size: int, blocks: int) -> int:
    """The width of blocks that cover `size` in so many; published ones have 128."""
    if blocks <= 1:
        return 128 if size <= 128 or blocks < 1 else size
    return 128 if -(-size // 128) == blocks else -(-size // blocks)


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]
