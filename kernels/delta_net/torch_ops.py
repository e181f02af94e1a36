"""Gates and rule of a gated delta net, one operator after the other."""

from __future__ import annotations

from torch import Tensor

from specmamba.kernels import gated_delta_rule, rowwise
from specmamba.kernels.delta_net.operands import Weights
from specmamba.kernels.state_records import StateOperands


def gate_and_advance(mixed: Tensor, a: Tensor, b: Tensor, weights: Weights, state: StateOperands) -> Tensor:
    """Each operator takes its own best form."""
    w = weights
    heads = w.num_key_heads, w.key_dim, w.step_scale, w.lower_bound
    q, k, g, beta = rowwise.delta_inputs(mixed, a, b, w.negative_a, w.dt_bias, *heads)
    return gated_delta_rule.advance(q, k, values_of(mixed, w), g, beta, state)


def values_of(mixed: Tensor, weights: Weights) -> Tensor:
    """Values [B, L, Hv, V] among the convolved channels [B, L, C]."""
    w = weights
    values: Tensor = mixed[..., 2 * w.num_key_heads * w.key_dim :].unflatten(-1, (w.num_value_heads, w.value_dim))
    return values
