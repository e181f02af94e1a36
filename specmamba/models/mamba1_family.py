"""Mamba1 (arXiv 2312.00752): models of selective state spaces alone, Mamba and Falcon-Mamba (arXiv 2410.05355); Jamba.

The first two have no attention, so they keep nothing per token. ``residual_in_fp32`` is not followed, as in Mamba2.
Jamba (arXiv 2403.19887) has attention among its Mamba1 layers, which does not rotate, and experts or a SwiGLU layer
behind each of either kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.layers.feed_forward import MoE, SoftmaxRouter
from specmamba.layers.mamba1 import Mamba1, Mamba1Weights
from specmamba.layers.primitives import RMSNorm
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
from specmamba.models.mamba2_family import CONTEXT_LENGTH, RENAMES
from specmamba.models.rank_shapes import own_state, selective_segment
from specmamba.models.weights import Weights, loaded_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["RENAMES", "Mamba1Layers", "load", "load_falcon", "load_jamba"]

JAMBA_NORMS = "dt_layernorm", "b_layernorm", "c_layernorm"


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Mamba from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    return _load(config, reader, options, None)


def load_falcon(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Falcon-Mamba, which norms time step, B and C, without weights; errors as for ``registry.load_model``."""
    c: Any = config
    return _load(config, reader, options, c.mixer_rms_eps)


def _load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions, inner_eps: float | None) -> LoadedModel:
    c: Any = config
    require_silu(c)
    weights = Weights(c, reader, options)
    layers = Mamba1Layers.of(weights, inner_eps)
    embedding = weights.take_embedding("backbone.embeddings.weight")
    blocks = []
    for i in range(c.num_hidden_layers):
        prefix = f"backbone.layers.{i}."
        norm = weights.norm(f"{prefix}norm.weight", c.hidden_size, c.layer_norm_epsilon)
        blocks.append(Block(((norm, layers.layer(f"{prefix}mixer.", i)),)))
    norm = weights.norm("backbone.norm_f.weight", c.hidden_size, c.layer_norm_epsilon)
    target, _ = weights.target(embedding, blocks, norm)
    reader.finish()
    return loaded_model(
        target, weights, c.num_hidden_layers, layers.shape, context_length=CONTEXT_LENGTH, rates=layers.rates
    )


@dataclass(frozen=True, slots=True)
class Mamba1Layers:
    """Makes the Mamba1 layers of a model."""

    weights: Weights
    shape: StateShape  # of all ranks
    rank: int  # R, of time steps
    inner_eps: float | None  # of norms of time step, B and C; None: they are not normed
    has_bias: bool  # of input and output projections
    has_conv_bias: bool
    rates: Tensor  # [layers, M, own C] float32: the layers' own are views, folds take all of them
    norm_names: Sequence[str] = ()  # of the norms of time step, B and C; without names they have no weights

    @classmethod
    def of(cls, weights: Weights, inner_eps: float | None) -> Mamba1Layers:
        """Read a config with the field names of Mamba itself."""
        c = weights.config
        shape = StateShape.selective(c.intermediate_size, c.state_size, c.conv_kernel)
        rates = _rates(weights, c.num_hidden_layers, shape)
        return cls(weights, shape, int(c.time_step_rank), inner_eps, c.use_bias, c.use_conv_bias, rates)

    @classmethod
    def jamba(cls, weights: Weights, num_layers: int) -> Mamba1Layers:
        """Read a config with the field names of Jamba; its ``intermediate_size`` is that of feed-forward layers."""
        c = weights.config
        shape = StateShape.selective(c.mamba_expand * c.hidden_size, c.mamba_d_state, c.mamba_d_conv)
        rates, biases = _rates(weights, num_layers, shape), (c.mamba_proj_bias, c.mamba_conv_bias)
        return cls(weights, shape, int(c.mamba_dt_rank), c.rms_norm_eps, *biases, rates, JAMBA_NORMS)

    def layer(self, prefix: str, state_layer: int) -> Mamba1:
        """Make the layer whose tensors begin with ``prefix``, which ends in a dot.

        A rank has some of the channels. Time steps, B and C are sums over all channels, so the ranks add them up before
        they are normed, and each computes the steps of its own channels from the whole sum.

        Raises:
            CheckpointError: a tensor is missing or misshapen.
            ConfigError: the channels cannot be divided among the ranks.
        """
        w, shape, of = self.weights, self.shape, selective_segment(self.shape)
        channels, size, hidden = shape.value_dim, shape.key_dim, w.config.hidden_size
        rates = self.rates[state_layer]
        rates.copy_(-self._own(f"{prefix}A_log", size).exp().t())
        made = Mamba1Weights(
            # the kernel reads the convolution by tap
            conv=self._own(f"{prefix}conv1d.weight", 1, shape.conv_width).squeeze(1).t().contiguous().t(),
            conv_bias=self._own(f"{prefix}conv1d.bias") if self.has_conv_bias else None,
            project=w.take_linear(f"{prefix}x_proj", self.rank + 2 * size, channels, inputs=[of]),
            norms=self.inner_norms(prefix),
            expand=w.take_linear(f"{prefix}dt_proj", channels, self.rank, outputs=[of]),
            dt_bias=self._own(f"{prefix}dt_proj.bias"),
            rates=rates,
            skip=self._own(f"{prefix}D"),
        )
        project = w.take_linear(f"{prefix}in_proj", 2 * channels, hidden, self.has_bias, outputs=[of, of])
        out = w.take_linear(f"{prefix}out_proj", hidden, channels, self.has_bias, inputs=[of])
        return Mamba1(state_layer, own_state(shape, w.share), project, out, made)

    def _own(self, name: str, *of_channel: int) -> Tensor:
        """This rank's channels of a tensor [C, ...] float32."""
        of = selective_segment(self.shape)
        return self.weights.part(self.weights.take(name, of.size, *of_channel, dtype=torch.float32), of)

    def inner_norms(self, prefix: str) -> Sequence[RMSNorm] | None:
        """The norms of time step, B and C; those of Falcon-Mamba have no weights in its checkpoints."""
        if self.inner_eps is None:
            return None
        eps, w, sizes = self.inner_eps, self.weights, (self.rank, self.shape.key_dim, self.shape.key_dim)
        if self.norm_names:
            named = zip(self.norm_names, sizes, strict=True)
            return [w.norm(f"{prefix}{name}.weight", size, eps) for name, size in named]
        ones = [w.keep_instead(torch.ones(size, device=w.options.device)) for size in sizes]
        return [RMSNorm(weight, eps) for weight in ones]


def _rates(weights: Weights, num_layers: int, shape: StateShape) -> Tensor:
    """Room for A of all layers, of this rank's channels."""
    own = own_state(shape, weights.share)
    return torch.empty(num_layers, own.key_dim, own.value_dim, device=weights.options.device)


def load_jamba(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
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
