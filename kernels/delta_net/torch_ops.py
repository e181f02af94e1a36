"""A gated delta net layer between its projections, in PyTorch and whatever its parts choose. See README.md."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specmamba.kernels import rowwise
from specmamba.kernels.delta_net.operands import Inputs, Weights

Convolve = Callable[[Tensor, Tensor], Tensor]
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def compose(inputs: Inputs, weights: Weights, convolve: Convolve, delta_rule: DeltaRule) -> Tensor:
    """Convolution, gates, delta rule and gated norm, one after the other, over whatever keeps the states.

    Args:
        inputs: of tokens [B, L].
        weights: of the layer.
        convolve: inputs [B, L, C] and weight [C, W] -> [B, L, C] float32, with SiLU.
        delta_rule: q, k [B, L, Hk, K], v [B, L, Hv, V], g, beta [B, L, Hv] -> [B, L, Hv, V], all float32.

    Returns:
        [B, L, Hv, V] in the gate's dtype.
    """
    w = weights
    mixed = convolve(inputs.mixed, w.conv)
    q, k, g, beta = rowwise.delta_inputs(mixed, inputs.a, inputs.b, w.negative_a, w.dt_bias, w.num_key_heads, w.key_dim)
    v = mixed[..., 2 * w.num_key_heads * w.key_dim :].unflatten(-1, (w.num_value_heads, w.value_dim))
    return rowwise.gated_rms_norm(delta_rule(q, k, v, g, beta), inputs.gate, w.norm, w.norm_eps)
