"""LFM2 (arXiv 2511.23404): gated short convolutions and attention take turns, each with a SwiGLU layer behind it.

A convolution's state is the window of its last inputs; there is no recurrence. LFM2-MoE has experts in place of the
SwiGLU layers, but for the first few. LFM3, as transformers has it, has two kinds of attention, full and over a window,
each with a rope of its own; attention heads have gates, and what a layer adds is normed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specmamba.cache.shapes import StateShape
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import short_conv
from specmamba.layers.feed_forward import MoE, SigmoidRouter
from specmamba.layers.primitives import RMSNorm, Rotary
from specmamba.layers.short_conv import ShortConv
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import (
    ATTENTION,
    WINDOWED,
    AttentionNames,
    Heads,
    attention_layer,
    gated_experts,
    gated_mlp,
    number_layers,
    require_experts,
    require_layer_types,
)
from specmamba.models.hybrid import Block, Layer, PostNorm
from specmamba.models.rank_shapes import channel_segment, own_state
from specmamba.models.weights import Weights, loaded_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()
SHORT_CONV = "conv"  # in ``layer_types``
NAMES = AttentionNames("out_proj", ("q_layernorm", "k_layernorm"))
HEAD_GATES = "gate_proj", "g_proj"  # of LFM3, as published, and as transformers names the layer
GATE, UP, DOWN = "w1", "w3", "w2"


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build LFM2; see ``load_layers``."""
    return load_layers(Lfm2Weights(config, reader, options))


def load_moe(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build LFM2 with mixtures of experts; see ``load_layers``."""
    return load_layers(Lfm2MoEWeights(config, reader, options))


def load_lfm3(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build LFM3; see ``load_layers``."""
    return load_layers(Lfm3Weights(config, reader, options))


def load_layers(weights: Lfm2Weights) -> LoadedModel:
    """Build a model from a checkpoint's config and tensors, with the layers that ``weights`` makes.

    Raises:
        CheckpointError: a tensor is missing, left over or misshapen.
        UnsupportedModelError: the config asks for a variant that this class does not compute.
    """
    c, heads = weights.config, weights.heads
    embedding = weights.take_embedding("model.embed_tokens.weight")
    numbered = number_layers([kind if kind == SHORT_CONV else ATTENTION for kind in c.layer_types])
    indices = [index for _, index in numbered]
    blocks = [weights.block(i, f"model.layers.{i}.", kind, indices[i]) for i, kind in enumerate(c.layer_types)]
    # in spite of its name it is behind the layers
    norm = weights.norm("model.embedding_norm.weight", c.hidden_size, c.norm_eps)
    rotary, of_windows = weights.rotaries()
    target, _ = weights.target(embedding, blocks, norm, rotary, window_rotary=of_windows)
    weights.reader.finish()
    num_convolutions = c.layer_types.count(SHORT_CONV)
    return loaded_model(
        target,
        weights,
        num_convolutions,
        weights.state_shape,
        kv=heads.kv_shapes(len(c.layer_types) - num_convolutions),
        attention_width=heads.width * c.layer_types.count(ATTENTION),  # windows do not grow with the text
    )


class Lfm2Weights(Weights):
    """Makes the layers of dense LFM2."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
        self.refuse_variants()
        self.heads = Heads.of(config)
        self.state_shape = StateShape.window(config.hidden_size, config.conv_L_cache)

    def refuse_variants(self) -> None:
        """Refuse what would be computed wrongly."""
        require_layer_types(self.config, SHORT_CONV)

    def rotaries(self) -> tuple[Rotary | None, Rotary | None]:
        """The rotary embedding of attention, and that of layers with a window where they have another."""
        return self.rotary(), None

    def block(self, layer: int, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then a feed-forward layer. ``index``: the mixer's place in the pool of its kind."""
        c = self.config
        mixer = self.attention(prefix, index) if kind == ATTENTION else self.short_conv(f"{prefix}conv.", index)
        norms = [self.norm(f"{prefix}{name}_norm.weight", c.hidden_size, c.norm_eps) for name in ("operator", "ffn")]
        return Block(((norms[0], mixer), (norms[1], self.feed_forward(layer, f"{prefix}feed_forward."))))

    def attention(self, prefix: str, kv_layer: int) -> Layer:
        """Attention with normed queries and keys."""
        eps = self.config.norm_eps
        return attention_layer(
            self, f"{prefix}self_attn.", kv_layer, self.heads, has_bias=False, norm_eps=eps, names=NAMES
        )

    def short_conv(self, prefix: str, state_layer: int) -> Layer:
        """The gated short convolution."""
        shape, has_bias = self.state_shape, self.config.conv_bias
        channels, segment, float32 = shape.conv_channels, channel_segment(shape), torch.float32
        conv = self.part(self.take(f"{prefix}conv.weight", channels, 1, shape.conv_width, dtype=float32), segment)
        bias = self.part(self.take(f"{prefix}conv.bias", channels, dtype=float32), segment) if has_bias else None
        # the kernel reads the convolution by tap
        weights = short_conv.Weights(conv=conv.squeeze(1).t().contiguous().t(), conv_bias=bias)
        project = self.take_linear(f"{prefix}in_proj", 3 * channels, channels, has_bias, outputs=[segment] * 3)
        out = self.take_linear(f"{prefix}out_proj", channels, channels, has_bias, inputs=[segment])
        return ShortConv(state_layer, own_state(shape, self.share), project, out, weights)

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """The second half of a block."""
        return gated_mlp(self, prefix, self.inner_size(), names=(GATE, UP, DOWN))

    def inner_size(self) -> int:
        """The width between the projections of a feed-forward layer, adjusted if the config says so."""
        c = self.config
        if not c.block_auto_adjust_ff_dim:
            return int(c.intermediate_size)
        inner = int(c.block_ffn_dim_multiplier * int(2 * c.intermediate_size / 3))
        return -(-inner // int(c.block_multiple_of)) * int(c.block_multiple_of)


class Lfm2MoEWeights(Lfm2Weights):
    """Makes the layers of LFM2-MoE, with experts behind the first ``num_dense_layers`` layers."""

    def inner_size(self) -> int:
        """The width of the dense layers, as the config gives it."""
        return int(self.config.intermediate_size)

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """The second half of a block."""
        c = self.config
        if layer < c.num_dense_layers:
            return super().feed_forward(layer, prefix)
        require_experts(c.num_experts_per_tok, c.num_experts)
        router = SigmoidRouter(
            self.take_router(f"{prefix}gate.weight", c.num_experts),
            self.expert_bias(prefix),
            c.num_experts_per_tok,
            renormalise=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
        )
        return MoE(
            router, gated_experts(self, f"{prefix}experts.", c.num_experts, c.moe_intermediate_size, (GATE, UP, DOWN))
        )

    def expert_bias(self, prefix: str) -> torch.Tensor:
        """What is added to the scores that experts are chosen by, [E] float32."""
        c = self.config
        if not c.use_expert_bias:
            return torch.zeros(c.num_experts, device=self.options.device)
        return self.take(f"{prefix}expert_bias", c.num_experts, dtype=torch.float32)


class Lfm3Weights(Lfm2Weights):
    """Makes the layers of LFM3."""

    def refuse_variants(self) -> None:
        """Refuse what would be computed wrongly."""
        c = self.config
        require_layer_types(c, SHORT_CONV, WINDOWED)
        if WINDOWED in c.layer_types and (type(c.sliding_window) is not int or c.sliding_window < 1):
            raise UnsupportedModelError(f"sliding_window should be a number of tokens, but is {c.sliding_window!r}")

    def rotaries(self) -> tuple[Rotary | None, Rotary | None]:
        """The rotary embeddings of full attention and of attention over a window, of those that there are."""
        parameters = self.config.rope_parameters
        for kind, of_kind in parameters.items():
            if isinstance(of_kind, dict) and of_kind.get("rope_type", "default") == "default":
                # with the default rope transformers rotates whole heads, whatever this factor is
                parameters[kind] = {name: x for name, x in of_kind.items() if name != "partial_rotary_factor"}
        full, windowed = (self.rotary(x) if x in self.config.layer_types else None for x in (ATTENTION, WINDOWED))
        return full, windowed

    def block(self, layer: int, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then a feed-forward layer. ``index``: the mixer's place in the pool of its kind."""
        if kind == SHORT_CONV:
            mixer = self.short_conv(f"{prefix}conv.", index)
        else:
            mixer = self.gated_attention(
                f"{prefix}self_attn.", index, self.config.sliding_window if kind == WINDOWED else 0
            )
        mlp = self.feed_forward(layer, f"{prefix}feed_forward.")
        layers = (f"{prefix}operator", f"{prefix}post_operator", mixer), (f"{prefix}ffn", f"{prefix}post_ffn", mlp)
        return Block(tuple((self._norm(before), self._normed(of, behind)) for before, behind, of in layers))

    def gated_attention(self, prefix: str, kv_layer: int, window: int) -> Layer:
        """Attention with normed queries and keys; ``window`` 0: full."""
        c = self.config
        gates = next((name for name in HEAD_GATES if self.reader.has(f"{prefix}{name}.weight")), HEAD_GATES[0])
        names = AttentionNames(head_gates=gates if c.use_attention_gate else None)
        return attention_layer(
            self,
            prefix,
            kv_layer,
            self.heads,
            has_bias=c.attention_bias,
            norm_eps=c.norm_eps,
            names=names,
            window=window,
        )

    def inner_size(self) -> int:
        """The width between the projections of a feed-forward layer."""
        return int(self.config.intermediate_size)

    def _norm(self, name: str) -> RMSNorm:
        return self.norm(f"{name}_norm.weight", self.config.hidden_size, self.config.norm_eps)

    def _normed(self, layer: Layer, name: str) -> Layer:
        """A layer whose output is normed, if the config says so."""
        return PostNorm(layer, self._norm(name)) if self.config.use_sandwich_norm else layer
