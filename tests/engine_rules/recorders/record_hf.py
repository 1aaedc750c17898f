"""What transformers builds for every model class: run with a Python that has it.

    python -m tests.engine_rules.recorders.record_hf FILE

Each class is built on the meta device; what counts is which modules are
`nn.Linear` (compressed-tensors, AWQ and fp8 replace those), what they are called
beside the checkpoint's names, and whether experts can be loaded one by one.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from tests.engine_rules.recorders.hf_answers import answers
from tests.engine_rules.recorders.tiny import CONFIGS
from tests.engine_rules.recorders.write import write

# Modules as a checkpoint names them, to be renamed by the class's own mapping.
CHECKPOINT_NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.block_sparse_moe.gate",
    "model.layers.0.block_sparse_moe.experts.0.w1",
    "model.layers.0.mlp.experts.0.gate_proj",
    "model.language_model.layers.0.self_attn.q_proj",
    "model.visual.blocks.0.attn.qkv",
    "language_model.model.layers.0.self_attn.q_proj",
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
]


def record() -> tuple[dict[str, Any], list[dict[str, str]]]:
    import torch
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    warnings.simplefilter("ignore")

    def build(name: str, config: dict[str, Any]) -> Any:
        kind = transformers.AutoConfig.for_model(
            **{k: v for k, v in config.items() if k != "architectures"}
        )
        with torch.device("meta"):
            return getattr(transformers, name)(kind)

    def describe(model: Any) -> dict[str, Any]:
        transforms = get_model_conversion_mapping(model)
        renamed = {}
        for old in CHECKPOINT_NAMES:
            new = old + ".weight"
            for transform in transforms:
                if not isinstance(transform, WeightConverter):
                    new, _ = transform.rename_source_key(new)
            renamed[old] = new.removesuffix(".weight")
        return {
            "linear": {
                n: [m.out_features, m.in_features]
                for n, m in model.named_modules()
                if isinstance(m, torch.nn.Linear)
            },
            "renamed": renamed,
            "expert_sources": sorted(
                p
                for t in transforms
                if isinstance(t, WeightConverter)
                for p in t.source_patterns
                if "experts" in p
            ),
            "tied": sorted(model.all_tied_weights_keys),
            "main_input": model.main_input_name,
        }

    models = {name: build(name, config) for name, config in CONFIGS.items()}
    return {name: describe(model) for name, model in models.items()}, answers(models)


if __name__ == "__main__":
    write(Path(sys.argv[1]), *record())
