"""Granite 4 hybrid: Mamba2 or attention, then an MLP for every token and, in most models, a mixture of experts.

There are constant multipliers at the embedding, at every residual connection, at the scores and at the logits. Most
models have no rotary embedding: the recurrent layers know the order of the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import rowwise
from specmamba.layers.feed_forward import GatedMLP, MoE, TopKSoftmaxRouter
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import (
    ATTENTION,
    RECURRENT,
    Heads,
    attention_layer,
    mlp_segment,
    number_layers,
    require_experts,
    require_layer_types,
    require_silu,
)
from specmamba.models.hybrid import Block, Layer
from specmamba.models.mamba2_family import Mamba2Config, mamba2_layer
from specmamba.models.matrices.expert_matrices import ExpertMatrices
from specmamba.models.weights import Weights, loaded_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()
GATE_UP = "gate", "up"  # the rows of an expert's first matrix


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build a Granite 4 hybrid from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    weights = GraniteWeights(config, reader, options)
    c, heads = weights.config, weights.heads
    embedding = weights.take_embedding("model.embed_tokens.weight")
    numbered = enumerate(number_layers(c.layer_types))
    blocks = [weights.block(f"model.layers.{i}.", kind, index) for i, (kind, index) in numbered]
    norm = weights.norm("model.norm.weight", c.hidden_size, c.rms_norm_eps)
    rotary = weights.rotary() if weights.has_rotary else None
    target, _ = weights.target(embedding, blocks, norm, rotary, c.embedding_multiplier, 1.0 / c.logits_scaling)
    reader.finish()
    num_attention = c.layer_types.count(ATTENTION)
    return loaded_model(
        target,
        weights,
        c.layer_types.count(RECURRENT),
        weights.mamba.shape,
        kv=heads.kv_shapes(num_attention),
        attention_width=heads.width * num_attention,
    )


class GraniteWeights(Weights):
    """Makes the layers of Granite 4 hybrid."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
        _refuse_variants(config)
        self.heads = Heads.of(config)
        self.has_rotary = config.position_embedding_type == "rope"
        self.mamba = Mamba2Config.bamba(config)

    def block(self, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then a feed-forward layer. ``index``: the mixer's place in the pool of its kind."""
        c = self.config
        mixer = self.attention(prefix, index) if kind == ATTENTION else self.recurrent(prefix, index)
        names = "input_layernorm", "post_attention_layernorm"
        norms = [self.norm(f"{prefix}{name}.weight", c.hidden_size, c.rms_norm_eps) for name in names]
        return Block(((norms[0], mixer), (norms[1], self.feed_forward(prefix))), c.residual_multiplier)

    def recurrent(self, prefix: str, state_layer: int) -> Layer:
        """The Mamba2 layer of a block."""
        return mamba2_layer(self, f"{prefix}mamba.", state_layer, self.mamba)

    def attention(self, prefix: str, kv_layer: int) -> Layer:
        """The attention layer of a block."""
        c = self.config
        return attention_layer(
            self,
            f"{prefix}self_attn.",
            kv_layer,
            self.heads,
            has_bias=c.attention_bias,
            has_rotary=self.has_rotary,
            score_scale=c.attention_multiplier,
        )

    def feed_forward(self, prefix: str) -> Layer:
        """The MLP that every token has; in models with experts, together with them."""
        c, hidden, inner = self.config, self.config.hidden_size, self.config.shared_intermediate_size
        channels = mlp_segment(inner)
        shared = GatedMLP(
            self.take_linear(f"{prefix}shared_mlp.input_linear", 2 * inner, hidden, outputs=[channels, channels]),
            self.take_linear(f"{prefix}shared_mlp.output_linear", hidden, inner, inputs=[channels]),
        )
        if not c.num_local_experts:
            return shared
        experts = f"{prefix}block_sparse_moe."
        matrices = ExpertMatrices(self, c.num_local_experts, hidden, c.intermediate_size)
        up = matrices.up(f"{experts}input_linear.weight", GATE_UP)
        down = matrices.down(f"{experts}output_linear.weight")
        router = self.take_router(f"{experts}router.layer.weight", c.num_local_experts)
        return MoE(TopKSoftmaxRouter(router, c.num_experts_per_tok), matrices.layer(up, down, rowwise.silu_mul), shared)


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly."""
    require_silu(config)
    if config.position_embedding_type not in (None, "nope", "rope"):
        raise UnsupportedModelError(
            f"position_embedding_type {config.position_embedding_type!r} is not supported (nope and rope are)"
        )
    normalization = getattr(config, "normalization_function", "rmsnorm")
    if normalization not in (None, "rmsnorm"):
        raise UnsupportedModelError(f"normalization_function {normalization!r} is not supported: only rmsnorm is")
    if config.num_local_experts:
        require_experts(config.num_experts_per_tok, config.num_local_experts)
    require_layer_types(config)
