"""Parameters of text models: attention, feed-forward, experts, gated delta nets, MTP blocks."""

from __future__ import annotations

from gguf2st.verification.expected.base import Builder, Expected, Experts, FieldError, Part

_GATED = (("gate_proj", "wide"), ("up_proj", "wide"), ("down_proj", "narrow"))


def whole(
    b: Builder, prefix: str = "model.", head: str = "lm_head", tied: bool = False
) -> Expected:
    """Embedding, last norm and output head."""
    hidden, vocabulary = b.size("hidden_size"), b.size("vocab_size")
    b.add(f"{prefix}embed_tokens.weight", vocabulary, hidden)
    b.norm(f"{prefix}norm", hidden)
    tied = b.flag("tie_word_embeddings", tied)
    if tied:
        b.add(f"{head}.weight", vocabulary, hidden, optional=True)
    else:
        b.linear(head, vocabulary, hidden)
    return b.done(prefix, tied=tied)


def blocks(b: Builder, prefix: str) -> list[str]:
    """Prefixes of all blocks."""
    return [f"{prefix}layers.{i}." for i in range(b.size("num_hidden_layers", most="layers"))]


def layer_types(b: Builder, count: int, other: str) -> list[bool]:
    """For each block, whether it is of the type `other`, from layer_types or the interval."""
    listed = b.config.get("layer_types")
    if isinstance(listed, list):
        if len(listed) != count:
            raise FieldError(f"layer_types has {len(listed)} entries for {count} layers")
        return [kind == other for kind in listed]
    interval = b.size("full_attention_interval", 4)
    return [bool((i + 1) % max(1, interval)) for i in range(count)]


def attention(
    b: Builder, block: str, *, bias: str = "", norms: bool = False, gated: bool = False
) -> None:
    """Projections of q, k, v and o; `bias` names those that have one ("qkv", "qkvo").

    With `gated`, q holds the output's gate, too.
    """
    hidden, heads = b.size("hidden_size"), b.size("num_attention_heads")
    pairs = b.size("num_key_value_heads", heads)
    head = b.size("head_dim", hidden // max(1, heads))
    q = heads * head * (2 if gated else 1)
    b.linear(f"{block}self_attn.q_proj", q, hidden, bias="q" in bias)
    b.linear(f"{block}self_attn.k_proj", pairs * head, hidden, bias="k" in bias)
    b.linear(f"{block}self_attn.v_proj", pairs * head, hidden, bias="v" in bias)
    b.linear(f"{block}self_attn.o_proj", hidden, heads * head, bias="o" in bias)
    if norms:
        b.norm(f"{block}self_attn.q_norm", head)
        b.norm(f"{block}self_attn.k_norm", head)


def feed_forward(b: Builder, path: str, width: int, *, bias: bool = False) -> None:
    """Gate, up and down."""
    hidden = b.size("hidden_size")
    for name, kind in _GATED:
        out, columns = (width, hidden) if kind == "wide" else (hidden, width)
        b.linear(f"{path}.{name}", out, columns, bias=bias)


def experts(
    b: Builder,
    path: str,
    count: int,
    width: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    transposed: bool = False,
) -> None:
    """One by one, or stacked as transformers' classes hold them: some transposed."""
    hidden = b.size("hidden_size")
    gate, up, down = (f"{path}.{{}}.{part}" for part in parts)
    b.experts.append(
        Experts(
            path,
            count,
            ((gate, (width, hidden)), (up, (width, hidden)), (down, (hidden, width))),
            (
                (f"{path}.gate_up_proj", (count, *_turned(2 * width, hidden, transposed))),
                (f"{path}.down_proj", (count, *_turned(hidden, width, transposed))),
            ),
            b.part,
        )
    )


def _turned(rows: int, columns: int, transposed: bool) -> tuple[int, int]:
    return (columns, rows) if transposed else (rows, columns)


def mixture(b: Builder, block: str, *, shared: bool, transposed: bool = False) -> None:
    """Router and experts of the Qwen families, with a shared expert in some."""
    hidden = b.size("hidden_size")
    # transformers writes one of both names (Qwen3MoeConfig.attribute_map), engines read both.
    count = b.size(
        "num_experts" if "num_experts" in b.config else "num_local_experts", most="experts"
    )
    b.linear(f"{block}mlp.gate", count, hidden)
    experts(b, f"{block}mlp.experts", count, b.size("moe_intermediate_size"), transposed=transposed)
    if shared:
        width = b.size("shared_expert_intermediate_size")
        feed_forward(b, f"{block}mlp.shared_expert", width)
        b.linear(f"{block}mlp.shared_expert_gate", 1, hidden)


def sparse(b: Builder, layer: int) -> bool:
    """Whether a block has experts (decoder_sparse_step, mlp_only_layers)."""
    dense = b.config.get("mlp_only_layers") or []
    step = b.size("decoder_sparse_step", 1)
    return layer not in dense and step > 0 and (layer + 1) % step == 0


def delta_net(b: Builder, block: str, *, joined: bool) -> None:
    """A gated delta net; `joined` is Qwen3-Next's, whose projections are two matrices."""
    hidden, path = b.size("hidden_size"), f"{block}linear_attn"
    keys = b.size("linear_num_key_heads") * b.size("linear_key_head_dim")
    heads, head = b.size("linear_num_value_heads"), b.size("linear_value_head_dim")
    values = heads * head
    if joined:
        b.linear(f"{path}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
        b.linear(f"{path}.in_proj_ba", 2 * heads, hidden)
    else:
        b.linear(f"{path}.in_proj_qkv", 2 * keys + values, hidden)
        b.linear(f"{path}.in_proj_z", values, hidden)
        b.linear(f"{path}.in_proj_b", heads, hidden)
        b.linear(f"{path}.in_proj_a", heads, hidden)
    b.linear(f"{path}.out_proj", hidden, values)
    b.add(f"{path}.conv1d.weight", 2 * keys + values, 1, b.size("linear_conv_kernel_dim", 4))
    b.add(f"{path}.A_log", heads)
    b.add(f"{path}.dt_bias", heads)
    b.norm(f"{path}.norm", head)


def two_norms(b: Builder, block: str) -> None:
    """Before attention and before the feed-forward part."""
    b.norm(f"{block}input_layernorm", b.size("hidden_size"))
    b.norm(f"{block}post_attention_layernorm", b.size("hidden_size"))


def llama(b: Builder) -> Expected:
    """models/llama/modeling_llama.py."""
    bias = "qkvo" if b.flag("attention_bias") else ""
    for block in blocks(b, "model."):
        attention(b, block, bias=bias)
        feed_forward(b, f"{block}mlp", b.size("intermediate_size"), bias=b.flag("mlp_bias"))
        two_norms(b, block)
    return whole(b)


def mixtral(b: Builder) -> Expected:
    """models/mixtral/modeling_mixtral.py, under the names of its checkpoints."""
    for block in blocks(b, "model."):
        attention(b, block)
        count = b.size("num_local_experts", most="experts")
        b.linear(f"{block}block_sparse_moe.gate", count, b.size("hidden_size"))
        path, width = f"{block}block_sparse_moe.experts", b.size("intermediate_size")
        experts(b, path, count, width, ("w1", "w3", "w2"))
        two_norms(b, block)
    return whole(b)


def qwen2(b: Builder) -> Expected:
    """models/qwen2/modeling_qwen2.py."""
    for block in blocks(b, "model."):
        attention(b, block, bias="qkv")
        feed_forward(b, f"{block}mlp", b.size("intermediate_size"))
        two_norms(b, block)
    return whole(b)


def qwen2_moe(b: Builder) -> Expected:
    """models/qwen2_moe/modeling_qwen2_moe.py."""
    layers = blocks(b, "model.")
    for number, block in enumerate(layers):
        attention(b, block, bias="qkv" if b.flag("qkv_bias", True) else "")
        if sparse(b, number):
            mixture(b, block, shared=True)
        else:
            feed_forward(b, f"{block}mlp", b.size("intermediate_size"))
        two_norms(b, block)
    return whole(b)


def qwen3(b: Builder, prefix: str = "model.") -> Expected:
    """models/qwen3/modeling_qwen3.py."""
    bias = "qkvo" if b.flag("attention_bias") else ""
    for block in blocks(b, prefix):
        attention(b, block, bias=bias, norms=True)
        feed_forward(b, f"{block}mlp", b.size("intermediate_size"))
        two_norms(b, block)
    return whole(b, prefix)


def qwen3_moe(b: Builder, prefix: str = "model.", *, transposed: bool = False) -> Expected:
    """models/qwen3_moe/modeling_qwen3_moe.py, and with transposed stacks models/qwen3_vl_moe."""
    bias = "qkvo" if b.flag("attention_bias") else ""
    layers = blocks(b, prefix)
    for number, block in enumerate(layers):
        attention(b, block, bias=bias, norms=True)
        if sparse(b, number):
            mixture(b, block, shared=False, transposed=transposed)
        else:
            feed_forward(b, f"{block}mlp", b.size("intermediate_size"))
        two_norms(b, block)
    return whole(b, prefix)


def qwen3_next(b: Builder) -> Expected:
    """models/qwen3_next/modeling_qwen3_next.py; vLLM's qwen3_next_mtp.py."""
    layers = blocks(b, "model.")
    for number, linear in enumerate(layer_types(b, len(layers), "linear_attention")):
        block = layers[number]
        if linear:
            delta_net(b, block, joined=True)
        else:
            attention(b, block, norms=True, gated=True)
        if sparse(b, number):
            mixture(b, block, shared=True)
        else:
            feed_forward(b, f"{block}mlp", b.size("intermediate_size"))
        two_norms(b, block)
    # Published configs don't name the block, so a checkpoint may lack it as a whole.
    drafter(b, b.size("mtp_num_hidden_layers", 1, most="layers"), moe=True)
    return whole(b)


def qwen3_5(b: Builder, prefix: str = "model.", *, moe: bool = False) -> Expected:
    """models/qwen3_5/modeling_qwen3_5.py and qwen3_5_moe; vLLM's qwen3_5_mtp.py."""
    layers = blocks(b, prefix)
    for block, linear in zip(layers, layer_types(b, len(layers), "linear_attention"), strict=True):
        if linear:
            delta_net(b, block, joined=False)
        else:
            attention(b, block, norms=True, gated=True)
        if moe:
            mixture(b, block, shared=True)
        else:
            feed_forward(b, f"{block}mlp", b.size("intermediate_size"))
        two_norms(b, block)
    drafter(b, b.size("mtp_num_hidden_layers", 0, most="layers"), moe=moe)
    return whole(b, prefix)


def drafter(b: Builder, layers: int, *, moe: bool) -> None:
    """An MTP block: the only part that a checkpoint may lack as a whole."""
    b.part = Part.MTP
    hidden = b.size("hidden_size")
    if layers:
        b.linear("mtp.fc", hidden, 2 * hidden)
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            b.norm(f"mtp.{name}", hidden)
    for number in range(layers):
        block = f"mtp.layers.{number}."
        attention(b, block, norms=True, gated=True)
        if moe:
            mixture(b, block, shared=True)
        else:
            feed_forward(b, f"{block}mlp", b.size("intermediate_size"))
        two_norms(b, block)
    b.part = Part.TEXT


def gemma(b: Builder, prefix: str = "model.", *, norms: bool, head: str = "lm_head") -> Expected:
    """models/gemma2/modeling_gemma2.py, and with `norms` of q and k models/gemma3."""
    hidden = b.size("hidden_size")
    bias = "qkvo" if b.flag("attention_bias") else ""
    for block in blocks(b, prefix):
        attention(b, block, bias=bias, norms=norms)
        feed_forward(b, f"{block}mlp", b.size("intermediate_size"))
        two_norms(b, block)
        b.norm(f"{block}pre_feedforward_layernorm", hidden)
        b.norm(f"{block}post_feedforward_layernorm", hidden)
    return whole(b, prefix, head, tied=True)


def gpt_oss(b: Builder) -> Expected:
    """models/gpt_oss/modeling_gpt_oss.py: transposed stacks, every projection with a bias."""
    hidden, width = b.size("hidden_size"), b.size("intermediate_size")
    count = b.size("num_local_experts", most="experts")
    for block in blocks(b, "model."):
        attention(b, block, bias="qkvo" if b.flag("attention_bias", True) else "")
        b.add(f"{block}self_attn.sinks", b.size("num_attention_heads"))
        b.linear(f"{block}mlp.router", count, hidden, bias=True)
        path = f"{block}mlp.experts"
        stacked = (
            (f"{path}.gate_up_proj", (count, hidden, 2 * width)),
            (f"{path}.down_proj", (count, width, hidden)),
        )
        b.experts.append(Experts(path, count, (), stacked))
        b.add(f"{path}.gate_up_proj_bias", count, 2 * width)
        b.add(f"{path}.down_proj_bias", count, hidden)
        two_norms(b, block)
    return whole(b)
