"""Falcon-H1: attention and Mamba2 in parallel in every block, and a constant multiplier (muP) for every product.

The multipliers are folded into the weights when they are loaded, except those of the embedding and of the output head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.layers.context import LayerContext
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import AttentionScales, Heads, attention_layer, gated_mlp, require_silu
from specmamba.models.hybrid import Block, Layer
from specmamba.models.mamba2_family import Mamba2Config, mamba2_layer
from specmamba.models.weights import Weights, loaded_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Falcon-H1 from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    weights = FalconWeights(config, reader, options)
    c, heads, num_layers = weights.config, weights.heads, config.num_hidden_layers
    embedding = weights.take_embedding("model.embed_tokens.weight")
    blocks = [weights.block(i) for i in range(num_layers)]
    norm = weights.norm("model.final_layernorm.weight", c.hidden_size, c.rms_norm_eps)
    scales = c.embedding_multiplier, c.lm_head_multiplier
    target, _ = weights.target(embedding, blocks, norm, weights.rotary(), *scales)
    reader.finish()
    width = heads.width * num_layers
    return loaded_model(
        target, weights, num_layers, weights.mamba.shape, kv=heads.kv_shapes(num_layers), attention_width=width
    )


class Sum:
    """Two layers in parallel: both get the same input, and their outputs are added."""

    def __init__(self, first: Layer, second: Layer) -> None:
        self.parts = first, second

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """Add the outputs of both layers for [B, L, H]."""
        first, second = self.parts
        return first(x, context) + second(x, context)


class FalconWeights(Weights):
    """Makes the layers of Falcon-H1."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
        _refuse_variants(config)
        self.heads = Heads.of(config)
        self.mamba = replace(
            Mamba2Config.bamba(config),
            has_out_bias=config.projectors_bias,
            has_norm=config.mamba_rms_norm,
            norm_before_gate=bool(config.mamba_norm_before_gate),  # null is false
        )
        self._channel_scale = _channel_scale(config.ssm_multipliers, self.mamba.shape)
        self._mamba_scales = config.ssm_in_multiplier, config.ssm_out_multiplier
        self._attention_scales = AttentionScales(
            config.attention_in_multiplier, config.key_multiplier, config.attention_out_multiplier
        )

    def block(self, layer: int) -> Block:
        """Attention and Mamba2 in parallel, then an MLP."""
        c, prefix = self.config, f"model.layers.{layer}."
        mixers = Sum(
            mamba2_layer(
                self, f"{prefix}mamba.", layer, self.mamba, channel_scale=self._channel_scale, scales=self._mamba_scales
            ),
            attention_layer(
                self, f"{prefix}self_attn.", layer, self.heads, has_bias=c.attention_bias, scales=self._attention_scales
            ),
        )
        gate_scale, down_scale = c.mlp_multipliers
        mlp = gated_mlp(
            self,
            f"{prefix}feed_forward.",
            c.intermediate_size,
            has_bias=c.mlp_bias,
            gate_scale=gate_scale,
            down_scale=down_scale,
        )
        names = "input_layernorm", "pre_ff_layernorm"
        norms = [self.norm(f"{prefix}{name}.weight", c.hidden_size, c.rms_norm_eps) for name in names]
        return Block(((norms[0], mixers), (norms[1], mlp)))


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly."""
    require_silu(config)
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if len(getattr(config, name)) != count:
            raise UnsupportedModelError(f"{name} {getattr(config, name)} should be {count} numbers")


def _channel_scale(multipliers: list[float], shape: StateShape) -> Tensor:
    """Factors [inner + C + heads] of the input projection's channels: gate, x, B, C, time steps."""
    inner, keys = shape.num_value_heads * shape.value_dim, shape.num_key_heads * shape.key_dim
    sizes = torch.tensor([inner, inner, keys, keys, shape.num_value_heads])
    return torch.tensor(multipliers, dtype=torch.float32).repeat_interleave(sizes)
