"""The parts of a Mamba2 layer around convolution and recurrence, in PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels.mamba2.operands import Weights
from specmamba.kernels.state_records import RowSet


def step(dt: Tensor, mixed: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Softplus, limits and products, operator by operator."""
    w = weights
    x = mixed[..., : w.num_heads * w.head_dim].unflatten(-1, (w.num_heads, w.head_dim))
    dt = F.softplus(dt + w.dt_bias).clamp(*w.dt_limit)
    return dt[..., None] * x, dt * w.negative_a


def gate_and_norm(recurred: Tensor, mixed: Tensor, gate: Tensor, weights: Weights, _slots: RowSet) -> Tensor:
    """Skip, gate and norm, operator by operator; rows of padding are computed like others."""
    w = weights
    opened: Tensor = F.silu(gate.float())
    inner = mixed[..., : w.num_heads * w.head_dim].unflatten(-1, (w.num_heads, w.head_dim))
    x: Tensor = (recurred + w.skip[:, None] * inner).flatten(2)
    if w.norm is None:
        x = x * opened
        return x.to(gate.dtype)
    x = x if w.norm_before_gate else x * opened
    grouped = x.unflatten(-1, (w.norm_groups, -1))
    x = (grouped * (grouped.square().mean(-1, keepdim=True) + w.norm_eps).rsqrt()).flatten(-2) * w.norm
    x = x * opened if w.norm_before_gate else x
    return x.to(gate.dtype)
