"""Full attention with normalised queries and keys, partial rotary embedding and a gated output."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.layers.context import LayerContext
from specmamba.layers.linear import Linear


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
        self._in = Linear(qkvg)
        self._out = Linear(out)
        heads = q_norm.expand(out.shape[1] // q_norm.shape[0], -1), k_norm.expand(num_kv_heads, -1)
        self._qk_norm = torch.cat(heads).float()  # queries and keys in one pass
        self._eps = eps

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        cos, sin = context.rotary.cos, context.rotary.sin
        return self._out(context.kv.gated_attend(self._kv_layer, self._in(x), self._qk_norm, self._eps, cos, sin))
