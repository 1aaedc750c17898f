"""What the tests of formats share: matrices, and the tensors that an encoder makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gguf2st.arrays import to_host
from gguf2st.targets import EncodeContext, Piece, Quantized, Scheme, Target, TensorSpec

Values = npt.NDArray[np.float32]

# safetensors' dtype -> what a piece must consist of, what torch reads it as
DTYPES = {
    "I64": ("<i8", torch.int64),
    "I32": ("<i4", torch.int32),
    "F32": ("<f4", torch.float32),
    "F16": ("<f2", torch.float16),
    "BF16": ("<u2", torch.bfloat16),
    "U8": ("u1", torch.uint8),
    "I8": ("i1", torch.int8),
    "F8_E4M3": ("u1", torch.float8_e4m3fn),
}


def matrix(out: int, columns: int, seed: int = 0) -> Values:
    """Like weights: groups of unlike magnitude, an outlier, a zero row."""
    rng = np.random.default_rng([seed, out, columns])
    values = rng.standard_normal((out, columns)) * rng.uniform(0.005, 0.05, (out, 1))
    values[:, :16] *= 3
    values[out // 2, columns // 2] = 0.9
    values[out // 3] = 0
    return values.astype(np.float32)


def importance(columns: int, seed: int = 0) -> Values:
    return np.random.default_rng([seed, columns]).uniform(0.1, 4, columns).astype(np.float32)


def module(out: int, columns: int, scheme: Scheme, name: str = "model.layers.0.mlp.down_proj"):
    return Quantized(name, (out, columns), scheme)


def chunkings(out: int, multiple: int) -> list[list[int]]:
    """Row counts of chunks: all at once, the smallest ones, and something uneven."""
    uneven = [multiple, 3 * multiple]
    cuts: list[int] = []
    while sum(cuts) < out:
        cuts.append(min(uneven[len(cuts) % 2], out - sum(cuts)))
    small = [multiple] * (out // multiple) + ([out % multiple] if out % multiple else [])
    return [[out], small, cuts]


def written(
    target: Target,
    item: Quantized,
    values: Values | torch.Tensor,
    context: EncodeContext,
    rows: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Leaf -> tensor as it would lie on disk; every element must be written exactly once."""
    specs = {spec.name: spec for spec in target.tensors(item)}
    assert all(name.startswith(f"{item.name}.") for name in specs)
    data = {name: np.zeros(spec.shape, DTYPES[spec.dtype][0]) for name, spec in specs.items()}
    count = {name: np.zeros(spec.shape, int) for name, spec in specs.items()}

    def write(piece: Piece) -> None:
        rows = to_host(piece.rows)
        spec, stop = specs[piece.tensor], piece.start + len(rows)
        assert rows.dtype == np.dtype(DTYPES[spec.dtype][0]), spec
        assert rows.shape[1:] == spec.shape[1:] and stop <= spec.shape[0], spec
        data[piece.tensor][piece.start : stop] = rows
        count[piece.tensor][piece.start : stop] += 1

    encoder, start = target.encoder(item, context), 0
    for step in rows or [len(values)]:
        for piece in encoder.encode(start, values[start : start + step]):
            write(piece)
        start += step
    assert start == len(values)
    for piece in encoder.finish():
        write(piece)
    assert all((c == 1).all() for c in count.values())
    return {
        name.removeprefix(f"{item.name}."): as_torch(data[name], spec)
        for name, spec in specs.items()
    }


def as_torch(data: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.tobytes()), dtype=DTYPES[spec.dtype][1]).view(spec.shape)


def same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and torch.equal(a[k].contiguous().view(torch.uint8), b[k].contiguous().view(torch.uint8))
        for k in a
    )


def error(values: Values, decoded: Values) -> float:
    """Relative root mean square error."""
    return math.sqrt(float(((values - decoded) ** 2).sum() / (values**2).sum()))
