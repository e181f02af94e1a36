"""What a Mamba2 layer does to each token besides convolution and recurrence, in Triton. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.mamba2 import triton_kernels
from specmamba.kernels.mamba2.operands import Weights
from specmamba.kernels.mamba2.tiles import norm_tile, step_tile
from specmamba.kernels.state_records import RowSet


def step(dt: Tensor, mixed: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Step sizes, softplus(dt + bias) within the limits, and with them the inputs of the recurrence.

    Args:
        dt: [B, N, H], any float dtype.
        mixed: [B, N, C] float32, x in the first H P channels.
        weights: of the layer.

    Returns:
        u = dt x [B, N, H, P] and the log decays g = dt A [B, N, H], float32.
    """
    dt, mixed, (batch, nodes, heads) = _dense(dt), _dense(mixed), dt.shape
    g = torch.empty(batch, nodes, heads, dtype=torch.float32, device=mixed.device)
    u = torch.empty(batch, nodes, heads, weights.head_dim, dtype=torch.float32, device=mixed.device)
    if g.numel() == 0:
        return u, g
    tile, of_heads = step_tile(weights.head_dim), (weights.dt_bias.contiguous(), weights.negative_a.contiguous())
    triton_kernels.step[(batch * nodes, -(-heads // tile.constexprs["HEADS"]))](
        *(dt, mixed, *of_heads, u, g, *map(float, weights.dt_limit)),
        *(*dt.stride()[:2], *mixed.stride()[:2], nodes),
        NUM_HEADS=heads,
        HEAD_DIM=weights.head_dim,
        **tile.constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return u, g


def gate_and_norm(recurred: Tensor, mixed: Tensor, gate: Tensor, weights: Weights, slots: RowSet) -> Tensor:
    """Add D x, multiply by silu(gate), and norm in groups before or after it, or not at all.

    Args:
        recurred: [B, N, H, P] float32, contiguous.
        mixed: [B, N, C] float32, x in the first H P channels.
        gate: [B, N, H P], any float dtype.
        weights: of the layer.
        slots: B state slots; rows of slot 0 are padding.

    Returns:
        [B, N, H P] in the gate's dtype; zeros on padding.
    """
    w, gate, mixed, (batch, nodes, inner) = weights, _dense(gate), _dense(mixed), gate.shape
    out = torch.empty(batch, nodes, inner, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    part, tile = norm_tile(inner, w.norm_groups, w.norm is not None)
    norm = None if w.norm is None else w.norm.contiguous()
    triton_kernels.gate_and_norm[(batch * nodes, inner // part)](
        *(recurred, mixed, gate, w.skip.contiguous(), norm, slots.index, out, w.norm_eps),
        *(*mixed.stride()[:2], *gate.stride()[:2], nodes),
        INNER=inner,
        PART=part,
        HEAD_DIM=w.head_dim,
        NORM_BEFORE_GATE=w.norm_before_gate,
        **tile.constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, as parts of a projection have it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
