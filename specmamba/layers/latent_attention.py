"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1): one row of the KV pool for a token.

The row is a *latent*, of which keys and values of all heads are linear functions, and in front of it a part of the key
that all heads share. The functions move to the other side of the products (section 2.1.2): queries are taken to the
latent's space, attention is that of many query heads over one key head, and its outputs are taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.kernels import moe, rowwise
from specmamba.kernels.moe import PackedExperts
from specmamba.kernels.paged_attention import AttentionConfig
from specmamba.layers.attention import Attention
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Sizes of a layer: of each of its heads, and of what heads share."""

    num_heads: int
    nope_dim: int  # of the part of a query or key that is a head's own and never rotated
    shared_dim: int  # R, of the part of a key that all heads share; rotated where a family rotates
    value_dim: int
    latent_dim: int

    @property
    def query_dim(self) -> int:
        return self.shared_dim + self.nope_dim

    @property
    def row_dim(self) -> int:
        """Numbers that the KV pool has of a token."""
        return self.shared_dim + self.latent_dim


class HeadProducts:
    """A matrix for each head: y[h] = x[h] W[h]^T. As with experts, of which every token has all."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [Hq, N, K]; not kept when a packed copy takes its place."""
        self._num_heads = len(weight)
        self._product: PackedExperts = moe.packed(weight)
        self.nbytes = self._product.nbytes  # of the tensors that are kept
        self.num_outputs = weight.shape[0] * weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., Hq, K] -> [..., Hq, N]."""
        rows = x.flatten(0, -2)
        head_of = torch.arange(self._num_heads, device=x.device).repeat(len(rows) // self._num_heads)[:, None]
        by_head, groups = moe.dispatch(rows, head_of, self._num_heads)
        y = moe.combine(self._product(by_head, groups), groups, torch.ones(len(rows), 1, device=x.device))
        return y.view(*x.shape[:-1], -1)


class LatentAttention(Attention):
    """One layer; its rows [R + latent] live at ``kv_layer`` of the KV pool, the shared part of keys first."""

    def __init__(
        self,
        kv_layer: int,
        heads: LatentHeads,
        project: Linear,
        query: tuple[RMSNorm, Linear] | None,
        norm: RMSNorm,
        to_latent: HeadProducts,
        from_latent: HeadProducts,
        out: Linear,
        has_rotary: bool,
        has_head_gates: bool = False,
    ) -> None:
        """Make the layer from its projections.

        Args:
            kv_layer: where this layer's rows live in the KV pool.
            heads: sizes.
            project: H -> queries [Hq (R + nope)], each with its shared part first, or the input of ``query``; then the
                shared part of the key [R], the latent, and gates [Hq] where there are any.
            query: the norm and the projection to queries, where these have a latent of their own.
            norm: of the latent.
            to_latent: nope -> latent, of every head.
            from_latent: latent -> value, of every head.
            out: Hq V -> H.
            has_rotary: the shared part of queries and keys is rotated.
            has_head_gates: outputs of a head are multiplied by the sigmoid of its gate.
        """
        scale = (heads.nope_dim + heads.shared_dim) ** -0.5
        form = AttentionConfig(heads.num_heads, 1, heads.row_dim, scale, latent_dim=heads.latent_dim)
        super().__init__(kv_layer, project, out, form, has_rotary)
        self._heads, self._query, self._norm = heads, query, norm
        self._to_latent, self._from_latent = to_latent, from_latent
        self._num_gates = heads.num_heads if has_head_gates else 0

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        heads, projected = self._heads, self._in(x)
        widths = heads.shared_dim, heads.latent_dim, self._num_gates
        queries, shared, latent, gates = projected.split([projected.shape[-1] - sum(widths), *widths], -1)
        if self._query is not None:
            norm, project = self._query
            queries = project(norm(queries))
        of_shared, own = queries.unflatten(-1, (heads.num_heads, -1)).split([heads.shared_dim, heads.nope_dim], -1)
        rows = torch.cat([of_shared, self._to_latent(own)], -1).flatten(-2)
        attended = self.attend(torch.cat([rows, shared, self._norm(latent)], -1), context)
        values = self._from_latent(attended.unflatten(-1, (heads.num_heads, -1)))
        if self._num_gates:
            values = rowwise.gate_heads(values, gates)
        return self._out(values.flatten(-2))
