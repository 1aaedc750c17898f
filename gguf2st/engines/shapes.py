"""What rules about shapes have in common."""

from __future__ import annotations

from collections.abc import Callable

from gguf2st.engines.base import Deployment, Kind, Matrix, Verdict
from gguf2st.scheme import Scheme


def over_ranks(
    matrix: Matrix, deployment: Deployment, of_rank: Callable[[Matrix, int], Verdict]
) -> Verdict:
    """The first refusal at a requested number of ranks, or all notes.

    A number that can't split the model at all says nothing about the scheme.
    """
    notes: dict[str, None] = {}
    for ranks in deployment.tensor_parallel:
        part = matrix.per_rank(ranks)
        if part is None:
            continue
        found = of_rank(part, ranks)
        at = f" at tensor parallel {ranks}" if ranks > 1 else ""
        if found.refusal:
            return Verdict(f"{found.refusal}{at}", cause=found.cause)
        notes.update(dict.fromkeys(f"{note}{at}" for note in found.notes))
    return Verdict(notes=tuple(notes))


def straddles(part: Matrix, scheme: Scheme) -> str:
    """A group must lie within one rank.

    vLLM: verify_group_size_divides_partition; SGLang: compressed_tensors_wNa16.py, and
    awq_linear.py of both. Their checks of Marlin allow a group as wide as all ranks
    together, but then no rank would hold its scale.
    """
    group = scheme.group_size
    if group and part.columns % group:
        return f"{part.columns} columns per rank are no whole groups of {group}"
    return ""


def words(part: Matrix, bits: int, what: str) -> str:
    """Whole 32-bit words of each stacked part, where words hold the values of several rows."""
    for rows in part.rows:
        if rows % (32 // bits):
            return f"{rows} rows per rank don't fill whole words of {what}"
    return ""


def fits_marlin(part: Matrix) -> bool:
    """Marlin's tiles are 64 rows by 128 columns or the other way round (is_valid_config)."""
    rows, columns = sum(part.rows), part.columns
    return (rows % 64 == 0 and columns % 128 == 0) or (rows % 128 == 0 and columns % 64 == 0)


def block_refusal(
    matrix: Matrix, part: Matrix, scheme: Scheme, ranks: int, *, last_may_end: bool
) -> str:
    """Both engines' validate_fp8_block_shape.

    On one rank, the last of several stacked matrices may end within a block; SGLang's own
    fp8 (`last_may_end` false; fp8.py validate_block_quant_shapes) doesn't allow that.
    """
    split = ranks > 1 and matrix.kind is not Kind.REPLICATED
    if split and matrix.kind is Kind.ROW:
        if part.columns % scheme.group_size:
            return f"{part.columns} columns per rank are no whole blocks of {scheme.group_size}"
        return ""
    checked = part.rows
    if not split:
        if len(part.rows) == 1:
            return ""
        checked = part.rows[:-1] if last_may_end else part.rows
    for rows in checked:
        if rows % scheme.block_rows:
            return f"{rows} rows of a stacked matrix are no whole blocks of {scheme.block_rows}"
    return ""


def halved_groups(inner: int, hidden: int, group: int) -> bool:
    """moe_wna16.py create_weights of both engines: groups are halved until they fit, down to 32."""
    while group > 32 and (inner % group or hidden % group):
        group //= 2
    return bool(group) and inner % group == 0 and hidden % group == 0
