"""What is computed for each token on its own, in PyTorch. See README.md.

At decode sizes the number of operators bounds the time of a step, so there are as few as possible.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

L2_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm in three operators."""
    return (x * _inverse_root(x, 1.0 / x.shape[-1], eps)).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, then its norm."""
    total = x + added
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False) -> Tensor:
    """The norm, then the gate in float32."""
    scaled = (x * _inverse_root(x, 1.0 / x.shape[-1], eps)).mul_(weight)
    factor = gate.float().sigmoid() if is_sigmoid else F.silu(gate.float())
    return scaled.mul_(factor).to(gate.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Both halves are views."""
    gate, up = torch.split_with_sizes(gate_up, [gate_up.shape[-1] // 2] * 2, -1)
    return F.silu(gate) * up


def clamped_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    """Computed in float32."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(gate_up.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """PyTorch's, which computes in float32."""
    return x.sigmoid()


def silu(x: Tensor) -> Tensor:
    """PyTorch's, which computes in float32."""
    return F.silu(x)


def gelu(x: Tensor) -> Tensor:
    """PyTorch's, which computes in float32."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """PyTorch's, which computes in float32."""
    return F.gelu(x, approximate="tanh")


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Phases in float32, then cosines and sines of all tokens."""
    phase = positions[..., None, None].float() * inverse_frequencies
    cos, sin = phase.cos(), phase.sin()
    if scaling != 1.0:
        cos, sin = cos * scaling, sin * scaling
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves are swapped by a concatenation."""
    dim = cos.shape[-1]
    first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    rotated = x[..., :dim] * cos + torch.cat([-second, first], -1) * sin
    return rotated if dim == x.shape[-1] else torch.cat([rotated, x[..., dim:]], -1)


def delta_inputs(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    step_scale: float = 1.0,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys are normalised together."""
    qk = mixed[..., : 2 * num_key_heads * key_dim].unflatten(-1, (2, num_key_heads, key_dim))
    q, k = (qk * _inverse_root(qk, 1.0, L2_EPS)).unbind(2)
    beta = b.float().sigmoid()
    beta = beta if step_scale == 1.0 else beta * step_scale
    rate = negative_a if a.dim() == 3 else negative_a[:, None]
    step = a.float() + dt_bias
    g = rate * F.softplus(step) if lower_bound is None else lower_bound * (-rate * step).sigmoid()
    return q * key_dim**-0.5, k, g, beta


def time_steps(raw: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Softplus, then the product."""
    steps = F.softplus(raw.float() + bias)
    return steps, steps * x


def skip_gate(y: Tensor, x: Tensor, skip: Tensor, gate: Tensor) -> Tensor:
    """Sum and gate in float32."""
    return (torch.addcmul(y, skip, x) * F.silu(gate.float())).to(gate.dtype)


def _inverse_root(x: Tensor, factor: float, eps: float) -> Tensor:
    """1 / sqrt(factor * sum(x^2) + eps) over the last dimension, float32: [..., D] -> [..., 1].

    One norm and one fused multiply-add take the place of square, sum, scale and add.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=factor).rsqrt_()


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)
