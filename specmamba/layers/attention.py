"""Full attention with normalised queries and keys, partial rotary embedding and a gated output."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.layers.context import LayerContext
from specmamba.layers.linear import Linear
from specmamba.layers.norm import RMSNorm


class GatedAttention:
    """Attention whose output is multiplied by sigmoid(gate(x)) before the output projection (Qwen3-Next, Qwen3.5)."""

    def __init__(
        self, kv_layer: int, qkvg: Tensor, out: Tensor, q_norm: Tensor, k_norm: Tensor, num_kv_heads: int, eps: float
    ) -> None:
        """Args:
        kv_layer: where this layer's keys and values live in the KV pool.
        qkvg: [(2 Hq + 2 Hkv) D, H], rows in the order queries, keys, values, gates.
        out: [H, Hq D].
        q_norm, k_norm: [D], ready to multiply.
        num_kv_heads: Hkv.
        eps: of the norms.
        """
        self._kv_layer = kv_layer
        self._head_dim = q_norm.shape[0]
        self._num_q_heads = out.shape[1] // self._head_dim
        self._num_kv_heads = num_kv_heads
        self._in = Linear(qkvg)
        self._out = Linear(out)
        weight = torch.cat([q_norm.expand(self._num_q_heads, -1), k_norm.expand(num_kv_heads, -1)])
        self._qk_norm = RMSNorm(weight, eps)  # queries and keys in one pass

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        batch, length, _ = x.shape
        q_dim, kv_dim = self._num_q_heads * self._head_dim, self._num_kv_heads * self._head_dim
        qk, v, gate = torch.split_with_sizes(self._in(x), [q_dim + kv_dim, kv_dim, q_dim], -1)
        qk = context.rotary.rotate(self._qk_norm(qk.view(batch, length, -1, self._head_dim)))
        q, k = torch.split_with_sizes(qk, [self._num_q_heads, self._num_kv_heads], 2)
        attended = context.kv.attend(self._kv_layer, q, k, v.view(batch, length, -1, self._head_dim))
        return self._out(attended.reshape(batch, length, q_dim) * gate.sigmoid())
