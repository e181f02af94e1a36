"""Full attention: grouped heads, with or without norms of queries and keys, rotary embedding, an output gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from specmamba.kernels import paged_attention, rowwise
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import DividedRMSNorm, Linear, RMSNorm


class NormedProjection:
    """A projection whose first parts are normed, each as one row over all of its heads."""

    def __init__(self, project: Linear, norms: Sequence[RMSNorm | DividedRMSNorm]) -> None:
        """norms: of the first parts of the product, in their order; the width of each is that of its weight."""
        self._project, self._norms = project, tuple(norms)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        projected = self._project(x)
        begin = 0
        for norm in self._norms:
            part = projected.narrow(-1, begin, len(norm.weight))
            part.copy_(norm(part))
            begin += len(norm.weight)
        return projected


class Attention:
    """One attention layer; its keys and values live at ``kv_layer`` of the KV pool."""

    def __init__(
        self,
        kv_layer: int,
        project: Callable[[Tensor], Tensor],
        out: Linear,
        form: paged_attention.AttentionConfig,
        has_rotary: bool = True,
    ) -> None:
        """Make the layer from its projections.

        Args:
            kv_layer: where this layer's keys and values live in the KV pool.
            project: H -> (Hq + 2 Hkv) D, with a gate Hq D more; in the order queries, keys, values, gates.
            out: Hq D -> H.
            form: the operations between the two: norms, rotary embedding, attention, gate.
            has_rotary: whether queries and keys are rotated by their positions.
        """
        self._kv_layer = kv_layer
        self._in, self._out = project, out
        self._form, self._has_rotary = form, has_rotary

    @property
    def form(self) -> paged_attention.AttentionConfig:
        """The operations between the two projections."""
        return self._form

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        return self._out(self.attend(self._in(x), context))

    def attend(self, projected: Tensor, context: LayerContext) -> Tensor:
        """What is between the projections; ``PagedKV.attend`` has the shapes."""
        cos = sin = None
        if self._has_rotary:
            has_own = self._form.window > 0 and context.window_rotary is not None
            rotary = context.window_rotary if has_own else context.rotary
            assert rotary is not None
            cos, sin = rotary.cos, rotary.sin
        return context.kv.attend(self._kv_layer, projected, self._form, cos, sin, context.packing)


class HeadGatedAttention(Attention):
    """Attention whose heads have a gate each: the projection gives [Hq] numbers more, behind the values."""

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        num_heads, projected = self._form.num_query_heads, self._in(x)
        qkv, gates = projected.split([projected.shape[-1] - num_heads, num_heads], -1)
        attended = self.attend(qkv, context).unflatten(-1, (num_heads, -1))
        return self._out(rowwise.gate_heads(attended, gates).flatten(-2))
