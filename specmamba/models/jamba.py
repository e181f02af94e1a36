"""Jamba (arXiv 2403.19887): Mamba1 layers with attention among them, and experts or a SwiGLU layer behind each.

Attention does not rotate: the recurrent layers know the order of the tokens. Norms of time step, B and C have weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.layers.feed_forward import MoE, SoftmaxRouter
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import (
    ATTENTION,
    RECURRENT,
    Heads,
    attention_layer,
    gated_experts,
    gated_mlp,
    number_layers,
    require_experts,
    require_silu,
)
from specmamba.models.hybrid import Block, Layer
from specmamba.models.mamba1_family import Mamba1Layers
from specmamba.models.weights import Weights, loaded_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Jamba from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    weights = JambaWeights(config, reader, options)
    c, heads, kinds = weights.config, weights.heads, weights.kinds
    embedding = weights.take_embedding("model.embed_tokens.weight")
    numbered = enumerate(number_layers(kinds))
    blocks = [weights.block(i, f"model.layers.{i}.", kind, index) for i, (kind, index) in numbered]
    norm = weights.norm("model.final_layernorm.weight", c.hidden_size, c.rms_norm_eps)
    target, _ = weights.target(embedding, blocks, norm)
    reader.finish()
    num_attention = kinds.count(ATTENTION)
    return loaded_model(
        target,
        weights,
        kinds.count(RECURRENT),
        weights.mamba.shape,
        kv=heads.kv_shapes(num_attention),
        attention_width=heads.width * num_attention,
        rates=weights.mamba.rates,
    )


class JambaWeights(Weights):
    """Makes the layers of Jamba."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
        require_silu(config)
        self.heads = Heads.of(config)
        self.kinds: list[str] = config.layer_types
        self.mamba = Mamba1Layers.jamba(self, self.kinds.count(RECURRENT))

    def block(self, layer: int, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then a feed-forward layer. ``index``: the mixer's place in the pool of its kind."""
        c = self.config
        mixer: Layer
        if kind == ATTENTION:
            attention = f"{prefix}self_attn."
            mixer = attention_layer(self, attention, index, self.heads, has_bias=False, has_rotary=False)
        else:
            mixer = self.mamba.layer(f"{prefix}mamba.", index)
        names = "input_layernorm", "pre_ff_layernorm"
        norms = [self.norm(f"{prefix}{name}.weight", c.hidden_size, c.rms_norm_eps) for name in names]
        return Block(((norms[0], mixer), (norms[1], self.feed_forward(layer, f"{prefix}feed_forward."))))

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """Experts in every layer whose turn it is, else a dense layer of the same width."""
        c = self.config
        num_experts = c.layers_num_experts[layer]
        if num_experts <= 1:
            return gated_mlp(self, prefix, c.intermediate_size)
        require_experts(c.num_experts_per_tok, num_experts)
        router = self.take_router(f"{prefix}router.weight", num_experts)
        routing = SoftmaxRouter(router, c.num_experts_per_tok, renormalise=False)
        return MoE(routing, gated_experts(self, f"{prefix}experts.", num_experts, c.intermediate_size))
