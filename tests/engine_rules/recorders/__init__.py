"""Scripts that ask the engines themselves, and write down what they say.

    python -m tests.engine_rules.recorders.record_vllm tests/engine_rules/recorded/vllm.json
    python -m tests.engine_rules.recorders.record_hf tests/engine_rules/recorded/hf.json
    python -m tests.engine_rules.recorders.record_sglang tests/engine_rules/recorded/sglang.json

The first two need vLLM's CPU build with transformers and compressed-tensors, the third an
environment with SGLang's wheel; no GPU, no kernels and no weights. Recorded with vLLM
0.32.0, transformers 5.19.0, compressed-tensors 0.17.0 and SGLang 0.5.23.
"""
