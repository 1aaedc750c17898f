"""Where an importance matrix scales, and by which exponent.

Scaling pays where four bits lose much. With eight, rounding what is scaled costs as much as it brings; and
what lies on its format's grid comes back exactly only as it is (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf2st.errors import InputError, UsageError
from gguf2st.folding import EXPONENT, Folding, fold_scales
from gguf2st.mapping import Resolution
from gguf2st.modules import Module, importance_of, modules_of
from gguf2st.options import PlanOptions
from gguf2st.targets import Quantized, Target
from gguf2st.targets.lossless import on_grid


def scaled_by_importance(
    resolution: Resolution,
    target: Target,
    options: PlanOptions,
    quantized: Sequence[tuple[Module, Quantized]],
) -> Folding:
    """All scales that move between matrices, for the modules that a plan quantizes.

    Raises `UsageError` for an importance matrix or an exponent that the format has no use for, and
    `InputError` for an importance matrix of another model.
    """
    if options.smoothing is not None and not 0 <= options.smoothing <= 1:
        raise UsageError(f"--smoothing {options.smoothing} isn't an exponent from 0 to 1.")
    if options.importance is None:
        if options.smoothing:
            raise UsageError("--smoothing needs an importance matrix; give one with --imatrix.")
        return Folding()
    matrices = (
        (module, expert)
        for recipe in resolution.recipes
        for module in modules_of(recipe)
        for expert in range(module.experts or 1)
    )
    if all(
        importance_of(module, options.importance, expert) is None for module, expert in matrices
    ):
        raise InputError(
            "the importance matrix has no entry that fits a matrix of "
            f"{resolution.model.language.path}; take the one that was made from this model."
        )
    if target.by_type:
        raise UsageError(
            f"an importance matrix is of no use to {target.name}, which keeps the values of the file; "
            "leave --imatrix out."
        )
    if not target.schemes():
        if options.smoothing is None:
            raise UsageError(
                f"an importance matrix is of no use to {target.name}; leave --imatrix out, or give "
                "--smoothing to make the result ready for another quantizer."
            )
        return fold_scales(resolution, options.importance, options.smoothing)
    integers = [
        (module, q.scheme)
        for module, q in quantized
        if q.scheme.kind == "int" and q.scheme.activation_bits == 16
    ]
    if options.smoothing and not integers:
        raise UsageError(
            f"{target.name} has no integers with 16-bit activations, which is what --smoothing is for; "
            "leave it out."
        )
    if options.smoothing is not None:
        names = {module.name for module, _ in integers}
        return fold_scales(resolution, options.importance, options.smoothing, names)
    coarse = {module.name for module, scheme in integers if scheme.bits < 8}
    exact = {module.name for module, scheme in integers if on_grid(module.block_types(), scheme)}
    return fold_scales(resolution, options.importance, EXPONENT, coarse, exact)
