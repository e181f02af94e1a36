"""Names and shapes of the tensors of published checkpoints, as they are without quantization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]


def attention(p: str, hidden: int, heads: int, key_heads: int, dim: int, gated: int = 1) -> Tensors:
    yield f"{p}q_proj.weight", (gated * heads * dim, hidden)
    yield from ((f"{p}{x}_proj.weight", (key_heads * dim, hidden)) for x in "kv")
    yield f"{p}o_proj.weight", (hidden, heads * dim)


def mamba(p: str, hidden: int, heads: int, dim: int, groups: int, state: int, has_norm: bool = True) -> Tensors:
    inner, channels = heads * dim, heads * dim + 2 * groups * state
    yield from ((f"{p}{x}", (heads,)) for x in ("A_log", "D", "dt_bias"))
    yield from ((f"{p}conv1d.weight", (channels, 1, 4)), (f"{p}conv1d.bias", (channels,)))
    yield from ((f"{p}in_proj.weight", (inner + channels + heads, hidden)), (f"{p}out_proj.weight", (hidden, inner)))
    if has_norm:
        yield f"{p}norm.weight", (inner,)


def mamba1(p: str, hidden: int, inner: int, rank: int, state: int) -> Tensors:
    yield from ((f"{p}A_log", (inner, state)), (f"{p}D", (inner,)))
    yield from ((f"{p}conv1d.weight", (inner, 1, 4)), (f"{p}conv1d.bias", (inner,)))
    yield from ((f"{p}in_proj.weight", (2 * inner, hidden)), (f"{p}out_proj.weight", (hidden, inner)))
    yield f"{p}x_proj.weight", (rank + 2 * state, inner)
    yield from ((f"{p}dt_proj.weight", (inner, rank)), (f"{p}dt_proj.bias", (inner,)))


def mlp(p: str, hidden: int, inner: int, names: tuple[str, ...] = ("gate", "up")) -> Tensors:
    yield from ((f"{p}{x}_proj.weight", (inner, hidden)) for x in names)
    yield f"{p}down_proj.weight", (hidden, inner)


def norms(p: str, size: int, *names: str) -> Tensors:
    yield from ((f"{p}{name}.weight", (size,)) for name in names)


def qwen(c: dict[str, Any], prefix: str, fused: bool, one_by_one: tuple[bool, bool] | None = None) -> Tensors:
    """Qwen3-Next has two fused projections in the delta net, Qwen3.5 has four.

    ``one_by_one``: whether experts have a tensor each, in the target and in the MTP head; None: as in bf16.
    """
    hidden, heads, key_heads, dim = (
        c[x] for x in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    value_heads, value_dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
    key, value = c["linear_num_key_heads"] * c["linear_key_head_dim"], value_heads * value_dim
    in_target, in_head = one_by_one or (fused, True)
    yield from ((name, (c["vocab_size"], hidden)) for name in (f"{prefix}embed_tokens.weight", "lm_head.weight"))
    yield from norms(prefix, hidden, "norm")

    def delta_net(p: str) -> Tensors:
        sizes = {"qkvz": 2 * key + 2 * value, "ba": 2 * value_heads} if fused else {"qkv": 2 * key + value, "z": value}
        sizes |= {} if fused else {"b": value_heads, "a": value_heads}
        yield from ((f"{p}in_proj_{x}.weight", (size, hidden)) for x, size in sizes.items())
        yield from ((f"{p}{x}", (value_heads,)) for x in ("A_log", "dt_bias"))
        yield f"{p}conv1d.weight", (2 * key + value, 1, 4)
        yield from norms(p, value_dim, "norm")
        yield f"{p}out_proj.weight", (hidden, value)

    def experts(p: str, each: bool) -> Tensors:
        count, inner = c["num_experts"], c["moe_intermediate_size"]
        yield f"{p}gate.weight", (count, hidden)
        yield f"{p}shared_expert_gate.weight", (1, hidden)
        yield from mlp(f"{p}shared_expert.", hidden, c["shared_expert_intermediate_size"])
        if each:
            for e in range(count):
                yield from mlp(f"{p}experts.{e}.", hidden, inner)
        else:
            yield f"{p}experts.gate_up_proj", (count, 2 * inner, hidden)
            yield f"{p}experts.down_proj", (count, hidden, inner)

    def block(p: str, is_attention: bool, each: bool) -> Tensors:
        yield from norms(p, hidden, "input_layernorm", "post_attention_layernorm")
        if is_attention:
            yield from attention(f"{p}self_attn.", hidden, heads, key_heads, dim, gated=2)
            yield from norms(f"{p}self_attn.", dim, "q_norm", "k_norm")
        else:
            yield from delta_net(f"{p}linear_attn.")
        has_experts = c.get("num_experts", 0) > 0
        yield from experts(f"{p}mlp.", each) if has_experts else mlp(f"{p}mlp.", hidden, c["intermediate_size"])

    for i in range(c["num_hidden_layers"]):
        yield from block(f"{prefix}layers.{i}.", i % 4 == 3, in_target)
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    yield from norms("mtp.", hidden, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    yield from block("mtp.layers.0.", is_attention=True, each=in_head)


def bamba(c: dict[str, Any]) -> Tensors:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    yield from ((name, (c["vocab_size"], hidden)) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    yield from norms("model.", hidden, "final_layernorm")
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield from norms(p, hidden, "input_layernorm", "pre_ff_layernorm")
        if i in c["attn_layer_indices"]:
            yield from attention(f"{p}self_attn.", hidden, heads, c["num_key_value_heads"], hidden // heads)
        else:
            sizes = c["mamba_n_heads"], c["mamba_d_head"], c["mamba_n_groups"], c["mamba_d_state"]
            yield from mamba(f"{p}mamba.", hidden, *sizes)
        yield from mlp(f"{p}feed_forward.", hidden, c["intermediate_size"])


def falcon(c: dict[str, Any]) -> Tensors:
    hidden, names = c["hidden_size"], ("model.embed_tokens.weight", "lm_head.weight")
    yield from ((name, (c["vocab_size"], hidden)) for name in names)
    yield from norms("model.", hidden, "final_layernorm")
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield from norms(p, hidden, "input_layernorm", "pre_ff_layernorm")
        yield from attention(
            f"{p}self_attn.", hidden, c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        )
        sizes = c["mamba_n_heads"], c["mamba_d_head"], c["mamba_n_groups"], c["mamba_d_state"], c["mamba_rms_norm"]
        yield from mamba(f"{p}mamba.", hidden, *sizes)
        yield from mlp(f"{p}feed_forward.", hidden, c["intermediate_size"])


def nemotron(c: dict[str, Any]) -> Tensors:
    hidden, names = c["hidden_size"], ("backbone.embeddings.weight", "lm_head.weight")
    yield from ((name, (c["vocab_size"], hidden)) for name in names)
    yield from norms("backbone.", hidden, "norm_f")

    def block(p: str, kind: str) -> Tensors:
        yield from norms(p, hidden, "norm")
        p = f"{p}mixer."
        if kind == "M":
            sizes = c["mamba_num_heads"], c["mamba_head_dim"], c["n_groups"], c["ssm_state_size"]
            yield from mamba(p, hidden, *sizes)
        elif kind == "*":
            yield from attention(p, hidden, c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"])
        elif kind == "-":
            yield from mlp(p, hidden, c["intermediate_size"], ("up",))
        else:
            width = c.get("moe_latent_size") or hidden
            yield f"{p}gate.weight", (c["n_routed_experts"], hidden)
            yield f"{p}gate.e_score_correction_bias", (c["n_routed_experts"],)
            yield from mlp(f"{p}shared_experts.", hidden, c["moe_shared_expert_intermediate_size"], ("up",))
            if width != hidden:
                yield f"{p}fc1_latent_proj.weight", (width, hidden)
                yield f"{p}fc2_latent_proj.weight", (hidden, width)
            for e in range(c["n_routed_experts"]):
                yield from mlp(f"{p}experts.{e}.", width, c["moe_intermediate_size"], ("up",))

    for i, kind in enumerate(kinds_of(c)):
        yield from block(f"backbone.layers.{i}.", kind)
    kinds = kinds_of(c, "mtp_")
    for i, kind in enumerate(kinds):
        yield from block(f"mtp.layers.{i}.", kind)
    if kinds:
        yield "mtp.layers.0.eh_proj.weight", (hidden, 2 * hidden)
        yield from norms("mtp.layers.0.", hidden, "enorm", "hnorm")
        yield from norms(f"mtp.layers.{len(kinds) - 1}.", hidden, "final_layernorm")


def kinds_of(c: dict[str, Any], prefix: str = "") -> str:
    """Kinds of the layers of a Nemotron-H, a letter each, of the config's pattern or of the list that replaces it."""
    letters = {"mamba": "M", "moe": "E", "attention": "*", "mlp": "-"}
    listed = "".join(letters[kind] for kind in c.get(f"{prefix}layers_block_type", ()))
    return listed or str(c.get(f"{prefix}hybrid_override_pattern", ""))


def granite(c: dict[str, Any]) -> Tensors:
    hidden, inner, num_experts = c["hidden_size"], c["shared_intermediate_size"], c["num_local_experts"]
    heads, key_heads = c["num_attention_heads"], c["num_key_value_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield from norms("model.", hidden, "norm")
    for i, kind in enumerate(c["layer_types"]):
        p = f"model.layers.{i}."
        yield from norms(p, hidden, "input_layernorm", "post_attention_layernorm")
        if kind == "mamba":
            yield from mamba(f"{p}mamba.", hidden, c["mamba_n_heads"], 64, 1, 128)
        else:
            yield from attention(f"{p}self_attn.", hidden, heads, key_heads, hidden // heads)
        yield f"{p}shared_mlp.input_linear.weight", (2 * inner, hidden)
        yield f"{p}shared_mlp.output_linear.weight", (hidden, inner)
        if num_experts:
            yield f"{p}block_sparse_moe.input_linear.weight", (num_experts, 2 * c["intermediate_size"], hidden)
            yield f"{p}block_sparse_moe.output_linear.weight", (num_experts, hidden, c["intermediate_size"])
            yield f"{p}block_sparse_moe.router.layer.weight", (num_experts, hidden)


def lfm2(c: dict[str, Any]) -> Tensors:
    """Dense LFM2 and LFM2-MoE; the width of the dense layers is that of the tensors."""
    hidden, heads, key_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim, inner = hidden // heads, c.get("intermediate_size") or c["block_ff_dim"]
    if c.get("block_auto_adjust_ff_dim"):
        inner = -(-(2 * inner // 3) // 256) * 256
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield from norms("model.", hidden, "embedding_norm")

    def feed_forward(p: str, width: int) -> Tensors:
        yield from ((f"{p}{x}.weight", (width, hidden)) for x in ("w1", "w3"))
        yield f"{p}w2.weight", (hidden, width)

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield from norms(p, hidden, "operator_norm", "ffn_norm")
        if i in c["full_attn_idxs"]:
            for name, shape in attention(f"{p}self_attn.", hidden, heads, key_heads, dim):
                yield name.replace("o_proj", "out_proj"), shape
            yield from norms(f"{p}self_attn.", dim, "q_layernorm", "k_layernorm")
        else:
            yield f"{p}conv.in_proj.weight", (3 * hidden, hidden)
            yield f"{p}conv.conv.weight", (hidden, 1, 3)
            yield f"{p}conv.out_proj.weight", (hidden, hidden)
        if i < c.get("num_dense_layers", c["num_hidden_layers"]):
            yield from feed_forward(f"{p}feed_forward.", inner)
            continue
        yield f"{p}feed_forward.gate.weight", (c["num_experts"], hidden)
        yield f"{p}feed_forward.expert_bias", (c["num_experts"],)
        for e in range(c["num_experts"]):
            yield from feed_forward(f"{p}feed_forward.experts.{e}.", c["moe_intermediate_size"])


def lfm3(c: dict[str, Any]) -> Tensors:
    """LFM3: the name of the gates is the one that transformers converts."""
    hidden, inner, heads, dim = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["head_dim"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield from norms("model.", hidden, "embedding_norm")
    for i, kind in enumerate(c["layer_types"]):
        p = f"model.layers.{i}."
        yield from norms(p, hidden, "operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
        if kind == "conv":
            yield f"{p}conv.in_proj.weight", (3 * hidden, hidden)
            yield f"{p}conv.conv.weight", (hidden, 1, c["conv_L_cache"])
            yield f"{p}conv.out_proj.weight", (hidden, hidden)
        else:
            yield from attention(f"{p}self_attn.", hidden, heads, c["num_key_value_heads"], dim)
            yield from norms(f"{p}self_attn.", dim, "q_norm", "k_norm")
            yield f"{p}self_attn.gate_proj.weight", (heads, hidden)
        yield from ((f"{p}feed_forward.{x}.weight", (inner, hidden)) for x in ("w1", "w3"))
        yield f"{p}feed_forward.w2.weight", (hidden, inner)


def olmo(c: dict[str, Any]) -> Tensors:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    key_heads, value_heads, width = (c[f"linear_{x}"] for x in ("num_key_heads", "num_value_heads", "value_head_dim"))
    key, value = key_heads * c["linear_key_head_dim"], value_heads * width
    yield from ((name, (c["vocab_size"], hidden)) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    yield from norms("model.", hidden, "norm")
    for i, kind in enumerate(c["layer_types"]):
        p = f"model.layers.{i}."
        yield from mlp(f"{p}mlp.", hidden, c["intermediate_size"])
        if kind == "full_attention":
            yield from norms(p, hidden, "post_attention_layernorm", "post_feedforward_layernorm")
            yield from attention(f"{p}self_attn.", hidden, heads, c["num_key_value_heads"], hidden // heads)
            yield from norms(f"{p}self_attn.", hidden, "q_norm", "k_norm")
            continue
        yield from norms(p, hidden, "attention_layer_norm", "feedforward_layer_norm")
        p = f"{p}linear_attn."
        sizes = {"q": key, "k": key, "v": value, "g": value, "a": value_heads, "b": value_heads}
        yield from ((f"{p}{x}_proj.weight", (size, hidden)) for x, size in sizes.items())
        yield from ((f"{p}{x}_conv1d.weight", (sizes[x], 1, 4)) for x in "qkv")
        yield from ((f"{p}{x}", (value_heads,)) for x in ("A_log", "dt_bias"))
        yield from norms(p, width, "o_norm")
        yield f"{p}o_proj.weight", (hidden, value)


def kimi(c: dict[str, Any]) -> Tensors:
    hidden, heads, rank, linear = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["linear_attn_config"]
    nope, shared, value = (c[x] for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    size, inner = linear["head_dim"], linear["num_heads"] * linear["head_dim"]
    yield from ((name, (c["vocab_size"], hidden)) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    yield from norms("model.", hidden, "norm")

    def delta(p: str) -> Tensors:
        yield from ((f"{p}{x}_proj.weight", (inner, hidden)) for x in "qkv")
        yield from ((f"{p}{x}_conv1d.weight", (inner, 1, linear["short_conv_kernel_size"])) for x in "qkv")
        for x in "fg":
            yield from ((f"{p}{x}_a_proj.weight", (size, hidden)), (f"{p}{x}_b_proj.weight", (inner, size)))
        yield f"{p}b_proj.weight", (linear["num_heads"], hidden)
        yield from ((f"{p}A_log", (1, 1, linear["num_heads"], 1)), (f"{p}dt_bias", (inner,)))
        yield from norms(p, size, "o_norm")
        yield f"{p}o_proj.weight", (hidden, inner)

    def latent(p: str) -> Tensors:
        yield f"{p}q_proj.weight", (heads * (nope + shared), hidden)
        yield f"{p}kv_a_proj_with_mqa.weight", (rank + shared, hidden)
        yield from norms(p, rank, "kv_a_layernorm")
        yield f"{p}kv_b_proj.weight", (heads * (nope + value), rank)
        yield f"{p}o_proj.weight", (hidden, heads * value)

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield from norms(p, hidden, "input_layernorm", "post_attention_layernorm")
        yield from (latent if i + 1 in linear["full_attn_layers"] else delta)(f"{p}self_attn.")
        if i < c["first_k_dense_replace"]:
            yield from mlp(f"{p}mlp.", hidden, c["intermediate_size"])
            continue
        p, expert = f"{p}block_sparse_moe.", c["moe_intermediate_size"]
        yield from (
            (f"{p}gate.weight", (c["num_experts"], hidden)),
            (f"{p}gate.e_score_correction_bias", (c["num_experts"],)),
        )
        yield from mlp(f"{p}shared_experts.", hidden, expert * c["num_shared_experts"])
        for e in range(c["num_experts"]):
            yield from ((f"{p}experts.{e}.{x}.weight", (expert, hidden)) for x in ("w1", "w3"))
            yield f"{p}experts.{e}.w2.weight", (hidden, expert)


def ling(c: dict[str, Any]) -> Tensors:
    """Layers of Ling-3, of which those behind ``num_hidden_layers`` are its MTP head."""
    hidden, heads, rank, dim = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["head_dim"]
    nope, shared, value = (c[x] for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    inner, experts, width = heads * dim, c["num_experts"], c["moe_intermediate_size"]
    yield from ((name, (c["vocab_size"], hidden)) for name in ("model.word_embeddings.weight", "lm_head.weight"))
    yield from norms("model.", hidden, "norm")

    def delta(p: str) -> Tensors:
        yield from ((f"{p}{x}_proj.weight", (inner, hidden)) for x in "qkvfg")
        yield from ((f"{p}{x}_conv1d.weight", (inner, 1, c["short_conv_kernel_size"])) for x in "qkv")
        yield f"{p}b_proj.weight", (heads, hidden)
        yield from ((f"{p}A_log", (heads,)), (f"{p}dt_bias", (inner,)))
        yield from norms(p, dim, "o_norm")
        yield f"{p}dense.weight", (hidden, inner)

    def latent(p: str) -> Tensors:
        yield f"{p}q_proj.weight", (heads * (nope + shared), hidden)
        yield f"{p}kv_a_proj_with_mqa.weight", (rank + shared, hidden)
        yield from norms(p, rank, "kv_a_layernorm")
        yield f"{p}kv_b_proj.weight", (heads * (nope + value), rank)
        yield f"{p}g_proj.weight", (heads, hidden)
        yield f"{p}dense.weight", (hidden, heads * value)

    for i in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        p, is_draft = f"model.layers.{i}.", i >= c["num_hidden_layers"]
        yield from norms(p, hidden, "input_layernorm", "post_attention_layernorm")
        if is_draft:
            yield from norms(p, hidden, "enorm", "hnorm", "final_layernorm")
            yield f"{p}eh_proj.weight", (hidden, 2 * hidden)
        yield from (latent if is_draft or (i + 1) % c["layer_group_size"] == 0 else delta)(f"{p}attention.")
        if i < c["first_k_dense_replace"]:
            yield from mlp(f"{p}mlp.", hidden, c["intermediate_size"])
            continue
        yield from ((f"{p}mlp.gate.weight", (experts, hidden)), (f"{p}mlp.gate.expert_bias", (experts,)))
        yield from mlp(f"{p}mlp.shared_experts.", hidden, width * c["num_shared_experts"])
        for e in range(experts):
            yield from mlp(f"{p}mlp.experts.{e}.", hidden, width)


def selective(c: dict[str, Any]) -> Tensors:
    """Falcon-Mamba and Mamba."""
    hidden, inner, rank, size = c["hidden_size"], c["expand"] * c["hidden_size"], c["time_step_rank"], c["state_size"]
    yield "backbone.embeddings.weight", (c["vocab_size"], hidden)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)
    yield from norms("backbone.", hidden, "norm_f")
    for i in range(c["num_hidden_layers"]):
        yield from norms(f"backbone.layers.{i}.", hidden, "norm")
        yield from mamba1(f"backbone.layers.{i}.mixer.", hidden, inner, rank, size)


def jamba(c: dict[str, Any]) -> Tensors:
    hidden, heads, key_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    inner, rank, size = c["mamba_expand"] * hidden, c["mamba_dt_rank"], c["mamba_d_state"]
    yield from ((name, (c["vocab_size"], hidden)) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    yield from norms("model.", hidden, "final_layernorm")

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield from norms(p, hidden, "input_layernorm", "pre_ff_layernorm")
        if i % c["attn_layer_period"] == c["attn_layer_offset"]:
            yield from attention(f"{p}self_attn.", hidden, heads, key_heads, hidden // heads)
        else:
            yield from mamba1(f"{p}mamba.", hidden, inner, rank, size)
            yield from norms(f"{p}mamba.", rank, "dt_layernorm")
            yield from norms(f"{p}mamba.", size, "b_layernorm", "c_layernorm")
        if i % c["expert_layer_period"] != c["expert_layer_offset"]:
            yield from mlp(f"{p}feed_forward.", hidden, c["intermediate_size"])
            continue
        yield f"{p}feed_forward.router.weight", (c["num_experts"], hidden)
        for e in range(c["num_experts"]):
            yield from mlp(f"{p}feed_forward.experts.{e}.", hidden, c["intermediate_size"])


def pure_mamba(c: dict[str, Any]) -> Tensors:
    hidden, names = c["hidden_size"], ("backbone.embeddings.weight", "lm_head.weight")
    yield from ((name, (c["vocab_size"], hidden)) for name in names)
    yield from norms("backbone.", hidden, "norm_f")
    for i in range(c["num_hidden_layers"]):
        yield from norms(f"backbone.layers.{i}.", hidden, "norm")
        sizes = c["num_heads"], c["head_dim"], c["n_groups"], c["state_size"]
        yield from mamba(f"backbone.layers.{i}.mixer.", hidden, *sizes)
