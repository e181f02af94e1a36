"""Bamba: Mamba2 layers with full attention among them, each with a SwiGLU layer behind it.

Half of each attention head is rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import (
    ATTENTION,
    RECURRENT,
    Heads,
    attention_layer,
    gated_mlp,
    number_layers,
    require_silu,
)
from specmamba.models.hybrid import Block, Layer
from specmamba.models.mamba2_family import Mamba2Config, mamba2_layer
from specmamba.models.weights import Weights, loaded_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Bamba from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    weights = BambaWeights(config, reader, options)
    c, heads = weights.config, weights.heads
    kinds = c.layers_block_type
    embedding = weights.take_embedding("model.embed_tokens.weight")
    blocks = [weights.block(f"model.layers.{i}.", kind, index) for i, (kind, index) in enumerate(number_layers(kinds))]
    norm = weights.norm("model.final_layernorm.weight", c.hidden_size, c.rms_norm_eps)
    target, _ = weights.target(embedding, blocks, norm, weights.rotary())
    reader.finish()
    num_attention = kinds.count(ATTENTION)
    return loaded_model(
        target,
        weights,
        kinds.count(RECURRENT),
        weights.mamba.shape,
        kv=heads.kv_shapes(num_attention),
        attention_width=heads.width * num_attention,
    )


class BambaWeights(Weights):
    """Makes the layers of Bamba."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
        _refuse_variants(config)
        self.heads = Heads.of(config)
        self.mamba = Mamba2Config.bamba(config)

    def block(self, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then an MLP. ``index``: the mixer's place in the pool of its kind."""
        c = self.config
        mixer: Layer
        if kind == ATTENTION:
            mixer = attention_layer(self, f"{prefix}self_attn.", index, self.heads, has_bias=c.attention_bias)
        else:
            mixer = mamba2_layer(self, f"{prefix}mamba.", index, self.mamba)
        names = "input_layernorm", "pre_ff_layernorm"
        norms = [self.norm(f"{prefix}{name}.weight", c.hidden_size, c.rms_norm_eps) for name in names]
        mlp = gated_mlp(self, f"{prefix}feed_forward.", c.intermediate_size, has_bias=c.mlp_bias)
        return Block(((norms[0], mixer), (norms[1], mlp)))


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly."""
    require_silu(config)
    layers = config.num_hidden_layers
    if missing := [i for i in config.attn_layer_indices or () if not 0 <= i < layers]:
        raise UnsupportedModelError(f"attn_layer_indices {missing}: the model has layers 0 to {layers - 1}")
