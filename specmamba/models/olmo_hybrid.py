"""Olmo-Hybrid: gated delta nets and full attention, each with a SwiGLU layer behind it.

Steps of the delta rule go up to 2. Queries are normed as one row over all heads, and so are keys. A block with a delta
net norms the inputs of its layers, a block with attention their outputs. Released checkpoints do not rotate: their
``rope_theta`` is null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import delta_net, paged_attention
from specmamba.layers.attention import Attention, NormedProjection
from specmamba.layers.gated_delta_net import GatedDeltaNet
from specmamba.layers.primitives import DividedRMSNorm, RMSNorm
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import (
    ATTENTION,
    RECURRENT,
    Heads,
    convolution_by_tap,
    gated_mlp,
    number_layers,
    one_product,
    require_layer_types,
    require_silu,
)
from specmamba.models.hybrid import Block, PostNorm
from specmamba.models.rank_shapes import StateSegments
from specmamba.models.weights import Weights, loaded_model
from specmamba.parallel.share import Segment

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()
OUT_NORM_EPS = 1e-5  # of the delta net's norm, whatever the config says of the others
# Published names of the norms in front of a delta net and of its MLP, and what transformers calls them.
IN_NORMS = ("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")
# Of the norms behind attention and its MLP. What transformers saves again has the second name of the first one.
OUT_NORMS = ("post_attention_layernorm", "feedforward_layer_norm"), ("post_feedforward_layernorm",)


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Olmo-Hybrid from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    weights = OlmoWeights(config, reader, options)
    c, heads = weights.config, weights.heads
    embedding = weights.take_embedding("model.embed_tokens.weight")
    numbered = enumerate(number_layers(c.layer_types))
    blocks = [weights.block(f"model.layers.{i}.", kind, index) for i, (kind, index) in numbered]
    norm = weights.norm("model.norm.weight", c.hidden_size, c.rms_norm_eps)
    rotary = weights.rotary() if weights.has_rotary else None
    target, _ = weights.target(embedding, blocks, norm, rotary)
    reader.finish()
    num_attention = c.layer_types.count(ATTENTION)
    return loaded_model(
        target,
        weights,
        c.layer_types.count(RECURRENT),
        weights.state_shape,
        kv=heads.kv_shapes(num_attention),
        attention_width=heads.width * num_attention,
    )


class NoNorm:
    """In the place of a norm in front of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def behind(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, twice."""
        x = x + y
        return x, x


class OlmoWeights(Weights):
    """Makes the layers of Olmo-Hybrid."""

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions) -> None:
        super().__init__(config, reader, options)
        _refuse_variants(config)
        self.heads = Heads.of(config)
        self.has_rotary = config.rope_parameters.get("rope_theta") is not None
        self.state_shape = StateShape(
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_width=config.linear_conv_kernel_dim,
        )
        self.segments = StateSegments.of(self.state_shape, "linear key heads", "linear value heads")

    def block(self, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then an MLP. ``index``: the mixer's place in the pool of its kind."""
        mlp = gated_mlp(self, f"{prefix}mlp.", self.config.intermediate_size)
        if kind == ATTENTION:
            of_mixer, of_mlp = (self._norm(prefix, names) for names in OUT_NORMS)
            mixer = self.attention(f"{prefix}self_attn.", index)
            return Block(((NoNorm(), PostNorm(mixer, of_mixer)), (NoNorm(), PostNorm(mlp, of_mlp))))
        of_mixer, of_mlp = (self._norm(prefix, names) for names in IN_NORMS)
        return Block(((of_mixer, self.delta_net(f"{prefix}linear_attn.", index)), (of_mlp, mlp)))

    def _norm(self, prefix: str, names: tuple[str, ...]) -> RMSNorm:
        """The norm that is stored under one of these names; the first one if there is none."""
        name = next((name for name in names if self.reader.has(f"{prefix}{name}.weight")), names[0])
        return self.norm(f"{prefix}{name}.weight", self.config.hidden_size, self.config.rms_norm_eps)

    def attention(self, prefix: str, kv_layer: int) -> Attention:
        """Attention whose queries are normed as one row, and so are its keys."""
        c, heads, own = self.config, self.heads, self.heads.of_rank(self.share)
        dim, has_bias, queries, keys = heads.head_dim, c.attention_bias, heads.query_segment, heads.key_segment
        parts = {f"{name}_proj": (segment, 1.0) for name, segment in {"q": queries, "k": keys, "v": keys}.items()}
        product = one_product(self, prefix, parts, c.hidden_size, has_bias)
        norms = [self.row_norm(f"{prefix}{name}_norm.weight", of) for name, of in {"q": queries, "k": keys}.items()]
        out = self.take_linear(f"{prefix}o_proj", c.hidden_size, heads.width, has_bias, inputs=[queries])
        form = paged_attention.AttentionConfig(own.num_query_heads, own.num_key_heads, dim, dim**-0.5)
        return Attention(kv_layer, NormedProjection(product, norms), out, form, self.has_rotary)

    def row_norm(self, name: str, segment: Segment) -> RMSNorm | DividedRMSNorm:
        """The norm of all heads of a segment as one row, which several ranks may have parts of."""
        norm = self.norm(name, segment.size, self.config.rms_norm_eps)
        if self.share.size == 1:
            return norm
        weight = self.part(norm.weight, segment)
        one_row = torch.zeros(len(weight), dtype=torch.int64), 1
        counted = segment.size * self.share.copies(segment)
        return DividedRMSNorm(weight, self.config.rms_norm_eps, *one_row, counted, self.ranks)

    def delta_net(self, prefix: str, state_layer: int) -> GatedDeltaNet:
        """The recurrent layer."""
        c, s, of = self.config, self.state_shape, self.segments
        own = of.own(s, self.share)
        of_heads = (
            self.take(f"{prefix}{name}", s.num_value_heads, dtype=torch.float32) for name in ("A_log", "dt_bias")
        )
        a_log, dt_bias = (self.part(x, of.heads) for x in of_heads)
        conv = self.part(convolution_by_tap(self, prefix, s), *of.convolved)
        weights = delta_net.Weights(
            conv=conv.t().contiguous().t(),  # the kernel reads it by tap
            negative_a=-a_log.exp(),
            dt_bias=dt_bias,
            norm=self.take(f"{prefix}o_norm.weight", s.value_dim, dtype=torch.float32),
            norm_eps=OUT_NORM_EPS,
            num_key_heads=own.num_key_heads,
            key_dim=s.key_dim,
            step_scale=2.0 if c.linear_allow_neg_eigval else 1.0,
        )
        outputs = {"q": of.keys, "k": of.keys, "v": of.values, "g": of.values, "b": of.heads, "a": of.heads}
        parts = [
            self.take_matrix(f"{prefix}{name}_proj.weight", segment.size, c.hidden_size, outputs=[segment])
            for name, segment in outputs.items()
        ]
        out = self.take_linear(f"{prefix}o_proj", c.hidden_size, of.values.size, inputs=[of.values])
        return GatedDeltaNet(state_layer, own, self.linear(parts[:4], gates=parts[4:]), out, weights)


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly."""
    require_silu(config)
    require_layer_types(config)
    value_heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    if value_heads % key_heads:
        raise UnsupportedModelError(f"{value_heads} value heads are not a multiple of {key_heads} key heads")
