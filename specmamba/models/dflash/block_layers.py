"""The layers of block heads: attention to a context and a block, and DFlash2's convolutions around a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.errors import CheckpointError
from specmamba.kernels import paged_attention
from specmamba.layers.attention import Attention
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import Linear, RMSNorm
from specmamba.models.common_layers import Heads, head_norms, one_product
from specmamba.models.eagle import HeadWeights
from specmamba.models.hybrid import Block, Layer


@dataclass(frozen=True, slots=True)
class BlockContext(LayerContext):
    """What a layer of a block head sees depends on its view."""

    views: tuple[LayerContext, ...] = ()  # in the order of ``BlockHead.views``


class BlockAttention(Attention):
    """Attention whose keys and values are made of two kinds of inputs: of a block, and of the context before it."""

    def __init__(
        self,
        kv_layer: int,
        queries: Linear,
        keys_and_values: Linear,
        out: Linear,
        form: paged_attention.AttentionConfig,
        view: int,
    ) -> None:
        """Make the layer from its projections.

        Args:
            kv_layer: where keys and values live in the KV pool.
            queries: H -> Hq D.
            keys_and_values: H -> 2 Hkv D, keys first.
            out: Hq D -> H.
            form: the operations between them.
            view: which of ``BlockContext.views`` a block has.
        """
        super().__init__(kv_layer, self._project, out, form)
        self._queries, self._keys_and_values, self._view = queries, keys_and_values, view
        self._query_width = form.num_query_heads * form.head_dim

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H], of blocks."""
        assert isinstance(context, BlockContext)
        return super().__call__(x, context.views[self._view])

    def remember(self, vectors: Tensor, context: LayerContext) -> None:
        """Store keys and values of context vectors [B, L, H]; what the queries of ``context`` see is not used."""
        stored = self._keys_and_values(vectors)
        nothing = stored.new_zeros((*stored.shape[:-1], self._query_width))
        self.attend(torch.cat([nothing, stored], -1), context)

    def _project(self, x: Tensor) -> Tensor:
        return torch.cat([self._queries(x), self._keys_and_values(x)], -1)


class Convolved:
    """A layer between two short convolutions over the tokens of a block, whose kernels depend on the layer's input.

    With x[i, c] the channel c of token i, a convolution gives sum_t (base[t, c] + k[i, t, g(c)]) x[i - t, c], where
    tokens before the block count as 0. The kernels k of both convolutions are one projection of the layer's input, with
    one number for each tap t and each group g of neighbouring channels.
    """

    def __init__(self, layer: Layer, base: Tensor, projection: Linear) -> None:
        """Wrap a layer.

        Args:
            layer: between the two.
            base: [2, T, H], the parts of both kernels that do not depend on the input.
            projection: H -> 2 T G, for G groups.
        """
        self.parts = (layer,)
        self._base, self._projection = base, projection

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        (layer,) = self.parts
        kernels = self._projection(x).unflatten(-1, (2, self._base.shape[1], -1))
        y = layer(_convolved(x, self._base[0], kernels[:, :, 0]), context)
        return _convolved(y, self._base[1], kernels[:, :, 1])


def _convolved(x: Tensor, base: Tensor, kernels: Tensor) -> Tensor:
    """Convolve x [B, L, H] with kernels base [T, H] + kernels [B, L, T, G]."""
    length, num_groups = x.shape[1], kernels.shape[3]
    weights = base.unflatten(-1, (num_groups, -1)) + kernels[..., None]
    grouped = x.unflatten(-1, (num_groups, -1))
    y: Tensor = weights[:, :, 0] * grouped
    for tap in range(1, min(len(base), length)):
        y = y + weights[:, :, tap] * F.pad(grouped[:, : length - tap], (0, 0, 0, 0, tap, 0))
    return y.flatten(2)


def block_attention(weights: HeadWeights, layer: int, view: int) -> BlockAttention:
    """Make the attention of one layer. Raises CheckpointError: a tensor is missing or misshapen."""
    c, heads, prefix = weights.config, Heads.of(weights.config), f"layers.{layer}.self_attn."
    own, has_bias = heads.of_rank(weights.share), weights.reader.has(f"{prefix}q_proj.bias")
    queries = one_product(weights, prefix, {"q_proj": (heads.query_segment, 1.0)}, c.hidden_size, has_bias)
    pair = dict.fromkeys(("k_proj", "v_proj"), (heads.key_segment, 1.0))
    keys_and_values = one_product(weights, prefix, pair, c.hidden_size, has_bias)
    out = weights.take_linear(
        f"{prefix}o_proj",
        c.hidden_size,
        heads.width,
        weights.reader.has(f"{prefix}o_proj.bias"),
        inputs=[heads.query_segment],
    )
    norm, dim = head_norms(weights, prefix, own), heads.head_dim
    form = paged_attention.AttentionConfig(own.num_query_heads, own.num_key_heads, dim, dim**-0.5, norm, c.rms_norm_eps)
    return BlockAttention(weights.first_kv_layer + layer, queries, keys_and_values, out, form, view)


def block_of(weights: HeadWeights, layer: int, attention: BlockAttention, convolution: tuple[int, int] | None) -> Block:
    """Make one block.

    Args:
        weights: of the head.
        layer: its number.
        attention: of that layer.
        convolution: taps, and channels of a group; None: there are none.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    norm: RMSNorm = weights.rms_norm(f"layers.{layer}.input_layernorm.weight")
    before_mlp, mlp = weights.feed_forward(layer)
    if convolution is None:
        return Block(((norm, attention), (before_mlp, mlp)))
    prefix = f"layers.{layer}."
    return Block(
        (
            (norm, _with_convolution(weights, f"{prefix}attention_conv", attention, *convolution)),
            (before_mlp, _with_convolution(weights, f"{prefix}mlp_conv", mlp, *convolution)),
        )
    )


def _with_convolution(weights: HeadWeights, name: str, layer: Layer, taps: int, group_size: int) -> Convolved:
    width = weights.config.hidden_size
    if width % group_size:
        raise CheckpointError(f"{weights.folder}: conv_group_size {group_size} does not divide hidden_size {width}")
    base = weights.take(f"{name}.base_kernel", 2, taps, width)
    projection = weights.take_linear(f"{name}.kernel_projection", 2 * taps * (width // group_size), width)
    return Convolved(layer, base, projection)
