"""A Mamba2 layer between its projections, in PyTorch and whatever its parts choose. See README.md."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels.mamba2.operands import Inputs, Weights

Convolve = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Recur = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def compose(inputs: Inputs, weights: Weights, convolve: Convolve, recur: Recur) -> Tensor:
    """Convolution, step sizes, recurrence, skip, gated norm, over whatever keeps the states.

    Args:
        inputs: of tokens [B, L].
        weights: of the layer.
        convolve: inputs [B, L, C], weight [C, W] and bias [C] -> [B, L, C] float32, with SiLU.
        recur: C, B [B, L, G, N], dt x [B, L, H, P], log decay dt A [B, L, H] -> [B, L, H, P], all float32.

    Returns:
        [B, L, H P] in the gate's dtype.
    """
    w = weights
    mixed = convolve(inputs.mixed, w.conv, w.conv_bias)
    state_size = w.num_groups * w.state_dim
    x, b, c = torch.split_with_sizes(mixed, [w.num_heads * w.head_dim, state_size, state_size], -1)
    x = x.unflatten(-1, (w.num_heads, w.head_dim))
    b, c = (y.unflatten(-1, (w.num_groups, w.state_dim)) for y in (b, c))
    dt = F.softplus(inputs.dt + w.dt_bias).clamp(*w.dt_limit)
    out = recur(c, b, dt[..., None] * x, dt * w.negative_a)
    return gate_and_norm((out + w.skip[:, None] * x).flatten(2), inputs.gate, w)


def gate_and_norm(x: Tensor, gate: Tensor, weights: Weights) -> Tensor:
    """Multiply by silu(gate), and norm in groups before or after it.

    Args:
        x: [B, L, H P] float32.
        gate: [B, L, H P].
        weights: ``norm`` and how it is applied; without a norm there is the gate alone.

    Returns:
        x's shape, the gate's dtype.
    """
    w, opened = weights, F.silu(gate.float())
    if w.norm is None:
        return (x * opened).to(gate.dtype)
    x = x if w.norm_before_gate else x * opened
    grouped = x.unflatten(-1, (w.norm_groups, -1))
    x = (grouped * (grouped.square().mean(-1, keepdim=True) + w.norm_eps).rsqrt()).flatten(-2) * w.norm
    return (x * opened if w.norm_before_gate else x).to(gate.dtype)
