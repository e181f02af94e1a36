"""Granite 4 hybrid: Mamba2 or attention, then an MLP that every token has and, in most models, a mixture of experts.

Multipliers stand at the embedding, at every residual connection, at the scores and at the logits. Most models do not
rotate queries and keys: order comes from the recurrent layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specmamba.cache.shapes import CacheShape, KVShape
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import rowwise
from specmamba.layers.mlp import GatedMLP
from specmamba.layers.moe import MoE, TopKSoftmaxRouter
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import Heads, attention_layer, mamba2_layer, mamba2_shape
from specmamba.models.hybrid import Block, HybridTarget, Layer
from specmamba.models.tensors import TensorReader
from specmamba.models.weights import Weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()
MAMBA, ATTENTION = "linear_attention", "full_attention"  # older configs say "mamba" and "attention": the same


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build the model from a checkpoint's config and tensors; see ``registry.Loader``.

    Raises:
        CheckpointError: a tensor is missing, left over or misshapen.
        UnsupportedModelError: the config asks for a variant that this class does not compute.
    """
    weights = GraniteWeights(config, reader, options)
    c, heads = weights.config, weights.heads
    embedding = weights.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    blocks = []
    index = {MAMBA: 0, ATTENTION: 0}  # layers of a kind are numbered in the pool of that kind
    for i, kind in enumerate(c.layer_types):
        blocks.append(weights.block(f"model.layers.{i}.", kind, index[kind]))
        index[kind] += 1
    norm = weights.norm("model.norm.weight", c.hidden_size, c.rms_norm_eps)
    head = weights.output_head("lm_head.weight", embedding, c.tie_word_embeddings)
    reader.finish()
    target = HybridTarget(
        embedding,
        blocks,
        norm,
        weights.linear(head),
        weights.rotary() if weights.has_rotary else None,
        embedding_scale=c.embedding_multiplier,
        logits_scale=1.0 / c.logits_scaling,
    )
    kv = (KVShape(index[ATTENTION], heads.num_key_heads, heads.head_dim),) if index[ATTENTION] else ()
    return LoadedModel(
        architecture="",
        target=target,
        draft_head=None,
        cache_shape=CacheShape(kv, num_state_layers=index[MAMBA], state=weights.state_shape, dtype=options.dtype),
        context_length=c.max_position_embeddings,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.num_bytes,
        num_layers=c.num_hidden_layers,
        attention_width=heads.width * index[ATTENTION],
    )


class GraniteWeights(Weights):
    """Makes this family's layers."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
        _refuse_variants(config)
        self.heads = Heads.of(config)
        self.has_rotary = config.position_embedding_type == "rope"
        self.state_shape = mamba2_shape(
            config.mamba_n_groups,
            config.mamba_d_state,
            config.mamba_n_heads,
            config.mamba_d_head,
            config.mamba_d_conv,
        )

    def block(self, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then a feed-forward layer. ``index``: the mixer's place in the pool of its kind."""
        c = self.config
        mixer = self.mamba(f"{prefix}mamba.", index) if kind == MAMBA else self.attention(f"{prefix}self_attn.", index)
        names = "input_layernorm", "post_attention_layernorm"
        norms = [self.norm(f"{prefix}{name}.weight", c.hidden_size, c.rms_norm_eps) for name in names]
        return Block(((norms[0], mixer), (norms[1], self.feed_forward(prefix))), c.residual_multiplier)

    def mamba(self, prefix: str, state_layer: int) -> Layer:
        c = self.config
        return mamba2_layer(
            self,
            prefix,
            state_layer,
            self.state_shape,
            eps=c.rms_norm_eps,
            has_proj_bias=c.mamba_proj_bias,
            has_out_bias=c.mamba_proj_bias,
            has_conv_bias=c.mamba_conv_bias,
            norm_groups=c.mamba_n_groups,
            dt_limit=c.time_step_limit,
        )

    def attention(self, prefix: str, kv_layer: int) -> Layer:
        c = self.config
        return attention_layer(
            self,
            prefix,
            kv_layer,
            self.heads,
            has_bias=c.attention_bias,
            has_rotary=self.has_rotary,
            score_scale=c.attention_multiplier,
        )

    def feed_forward(self, prefix: str) -> Layer:
        """The shared MLP, and beside it the experts where there are some."""
        c, hidden, inner = self.config, self.config.hidden_size, self.config.shared_intermediate_size
        shared = GatedMLP(
            self.take_linear(f"{prefix}shared_mlp.input_linear", 2 * inner, hidden),
            self.take_linear(f"{prefix}shared_mlp.output_linear", hidden, inner),
        )
        if not c.num_local_experts:
            return shared
        experts = f"{prefix}block_sparse_moe."
        up = self.take(f"{experts}input_linear.weight", c.num_local_experts, 2 * c.intermediate_size, hidden)
        down = self.take(f"{experts}output_linear.weight", c.num_local_experts, hidden, c.intermediate_size)
        router = self.take_router(f"{experts}router.layer.weight", c.num_local_experts)
        return MoE(TopKSoftmaxRouter(router, c.num_experts_per_tok), self.experts(up, down, rowwise.silu_mul), shared)


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly rather than compute it."""
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act {config.hidden_act!r} is not supported: only silu is")
    if config.position_embedding_type not in (None, "nope", "rope"):
        raise UnsupportedModelError(
            f"position_embedding_type {config.position_embedding_type!r} is not supported (nope and rope are)"
        )
    normalization = getattr(config, "normalization_function", "rmsnorm")
    if normalization not in (None, "rmsnorm"):
        raise UnsupportedModelError(f"normalization_function {normalization!r} is not supported: only rmsnorm is")
    num_experts, k = config.num_local_experts, config.num_experts_per_tok
    if num_experts and not 1 <= k <= num_experts:
        raise UnsupportedModelError(f"a token cannot go to {k} of {num_experts} experts")
    unknown = set(config.layer_types) - {MAMBA, ATTENTION}
    if unknown or len(config.layer_types) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types must give {MAMBA} or {ATTENTION} to each of {config.num_hidden_layers} layers"
        )
