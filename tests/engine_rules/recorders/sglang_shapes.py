"""SGLang's own rules about shapes; what its CUDA code asserts can't be asked here."""

from __future__ import annotations

import types
from typing import Any

from tests.engine_rules.recorders.shape_cases import blocks, experts, integers


def shapes() -> dict[str, str]:
    """Kind -> one letter for each case: "y" for taken, "-" for refused."""
    from sglang.srt.layers.quantization import fp8, fp8_utils, marlin_utils

    def integer(case: Any) -> str:
        taken, _ = marlin_utils.check_marlin_supports_shape(
            case.rows, case.columns, case.columns * case.ranks, case.group_size or -1
        )
        return "y" if taken else "-"

    def block(case: Any, *, own: bool) -> str:
        layer = types.SimpleNamespace(tp_group=types.SimpleNamespace(world_size=case.ranks))
        split = 1 if case.by_columns else case.ranks
        columns = case.columns // (case.ranks if case.by_columns else 1)
        parts = [rows // split for rows in case.rows]
        try:
            if own:
                config = types.SimpleNamespace(weight_block_size=[128, 128])
                fp8.Fp8LinearMethod.validate_block_quant_shapes(
                    layer, config, case.columns, columns, sum(case.rows), sum(parts), parts
                )
            else:
                fp8_utils.validate_fp8_block_shape(
                    layer, case.columns, sum(case.rows), columns, parts, [128, 128]
                )
        except ValueError:
            return "-"
        return "y"

    def expert(case: Any) -> str:
        layer = types.SimpleNamespace(
            hidden_size=case.hidden,
            intermediate_size_per_partition=case.inner,
            moe_runner_config=types.SimpleNamespace(
                apply_router_weight_on_input=False, is_gated=True, activation="silu"
            ),
        )
        taken = marlin_utils.check_moe_marlin_supports_layer(layer, case.group_size or -1)
        return "y" if taken else "-"

    return {
        "integers": "".join(map(integer, integers())),
        "blocks": "".join(block(case, own=True) for case in blocks()),
        "compressed blocks": "".join(block(case, own=False) for case in blocks()),
        "experts": "".join(map(expert, experts())),
    }
