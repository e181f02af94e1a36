"""Falcon-H1: attention and Mamba2 side by side in every block, and constant multipliers (muP) at every product.

Multipliers are part of the weights here, but for those of the embedding and of the output head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.errors import UnsupportedModelError
from specmamba.layers.context import LayerContext
from specmamba.layers.mlp import GatedMLP
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import Heads, attention_layer, mamba2_layer, mamba2_shape
from specmamba.models.hybrid import Block, HybridTarget, Layer
from specmamba.models.tensors import TensorReader
from specmamba.models.weights import Weights, scaled

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build the model from a checkpoint's config and tensors; see ``registry.Loader``.

    Raises:
        CheckpointError: a tensor is missing, left over or misshapen.
        UnsupportedModelError: the config asks for a variant that this class does not compute.
    """
    weights = FalconWeights(config, reader, options)
    c, heads = weights.config, weights.heads
    embedding = weights.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    blocks = [weights.block(i) for i in range(c.num_hidden_layers)]
    norm = weights.norm("model.final_layernorm.weight", c.hidden_size, c.rms_norm_eps)
    head = weights.output_head("lm_head.weight", embedding, c.tie_word_embeddings)
    reader.finish()
    target = HybridTarget(
        embedding,
        blocks,
        norm,
        weights.linear(head),
        weights.rotary(),
        embedding_scale=c.embedding_multiplier,
        logits_scale=c.lm_head_multiplier,
    )
    return LoadedModel(
        architecture="",
        target=target,
        draft_head=None,
        cache_shape=CacheShape(
            kv=(KVShape(c.num_hidden_layers, heads.num_key_heads, heads.head_dim),),
            num_state_layers=c.num_hidden_layers,
            state=weights.state_shape,
            dtype=options.dtype,
        ),
        context_length=c.max_position_embeddings,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.num_bytes,
        num_layers=c.num_hidden_layers,
        attention_width=heads.width * c.num_hidden_layers,
    )


class Sum:
    """Two layers side by side: both see the same, and what they give is added."""

    def __init__(self, first: Layer, second: Layer) -> None:
        self._first, self._second = first, second

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        return self._first(x, context) + self._second(x, context)


class FalconWeights(Weights):
    """Makes this family's layers."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
        _refuse_variants(config)
        self.heads = Heads.of(config)
        self.state_shape = mamba2_shape(
            config.mamba_n_groups,
            config.mamba_d_state,
            config.mamba_n_heads,
            config.mamba_d_head,
            config.mamba_d_conv,
        )
        self._channel_scale = _channel_scale(config.ssm_multipliers, self.state_shape)

    def block(self, layer: int) -> Block:
        c, prefix = self.config, f"model.layers.{layer}."
        mixers = Sum(
            mamba2_layer(
                self,
                f"{prefix}mamba.",
                layer,
                self.state_shape,
                eps=c.rms_norm_eps,
                has_proj_bias=c.mamba_proj_bias,
                has_out_bias=c.projectors_bias,
                has_conv_bias=c.mamba_conv_bias,
                norm_groups=c.mamba_n_groups,
                has_norm=c.mamba_rms_norm,
                norm_before_gate=c.mamba_norm_before_gate,
                dt_limit=c.time_step_limit,
                in_scale=c.ssm_in_multiplier,
                channel_scale=self._channel_scale,
                out_scale=c.ssm_out_multiplier,
            ),
            attention_layer(
                self,
                f"{prefix}self_attn.",
                layer,
                self.heads,
                has_bias=c.attention_bias,
                has_rotary=True,
                in_scale=c.attention_in_multiplier,
                key_scale=c.key_multiplier,
                out_scale=c.attention_out_multiplier,
            ),
        )
        names = "input_layernorm", "pre_ff_layernorm"
        norms = [self.norm(f"{prefix}{name}.weight", c.hidden_size, c.rms_norm_eps) for name in names]
        return Block(((norms[0], mixers), (norms[1], self.feed_forward(f"{prefix}feed_forward."))))

    def feed_forward(self, prefix: str) -> GatedMLP:
        c, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        gate_scale, down_scale = c.mlp_multipliers
        parts, biases = [], []
        for name, scale in (("gate", gate_scale), ("up", 1.0)):
            parts.append(scaled(self.take(f"{prefix}{name}_proj.weight", inner, hidden), scale))
            if c.mlp_bias:
                biases.append(scaled(self.take(f"{prefix}{name}_proj.bias", inner), scale))
        gate_up = self.linear(torch.cat(parts), torch.cat(biases) if c.mlp_bias else None)
        return GatedMLP(gate_up, self.take_linear(f"{prefix}down_proj", hidden, inner, c.mlp_bias, down_scale))


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly rather than compute it."""
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act {config.hidden_act!r} is not supported: only silu is")
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if len(getattr(config, name)) != count:
            raise UnsupportedModelError(f"{name} {getattr(config, name)} should be {count} numbers")


def _channel_scale(multipliers: list[float], shape: StateShape) -> Tensor:
    """Of the input projection's channels: gate, x, B, C, time steps."""
    inner, keys = shape.num_value_heads * shape.value_dim, shape.num_key_heads * shape.key_dim
    sizes = torch.tensor([inner, inner, keys, keys, shape.num_value_heads])
    return torch.tensor(multipliers, dtype=torch.float32).repeat_interleave(sizes)
