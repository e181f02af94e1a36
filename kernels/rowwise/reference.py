"""What is computed for each token on its own, spelled out: the specification of this op.

T stands for any leading dimensions, D and K for widths of heads. Arithmetic is float32 (float64 for float64 inputs);
results are rounded once, to the dtype that each function names.
"""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D] or [T, H, D], weight [D] or [H, D] -> x / sqrt(mean(x^2) + eps) * weight, in x's dtype."""
    wide = _widened(x)
    return (wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, added [T, D], weight [D] -> x + added, and rms_norm of what that was rounded to, in x's dtype."""
    total = (_widened(x) + _widened(added)).to(x.dtype)
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False) -> Tensor:
    """x, gate [T, H, D], weight [D] -> rms_norm(x) * silu(gate), or times sigmoid(gate), in the gate's dtype."""
    factor = 1 / (1 + torch.exp(-_widened(gate))) if is_sigmoid else _silu(_widened(gate))
    return (rms_norm(_widened(x), weight, eps) * factor).to(gate.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I], gates first -> silu(gate) * up [T, I]."""
    gate, up = _widened(gate_up).chunk(2, -1)
    return (_silu(gate) * up).to(gate_up.dtype)


def clamped_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    """[T, 2 I], gates first -> min(silu(gate), limit) * min(max(up, -limit), limit) [T, I]."""
    gate, up = _widened(gate_up).chunk(2, -1)
    return (_silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(gate_up.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """[...] -> 1 / (1 + e^-x) of each number."""
    return (1 / (1 + (-_widened(x)).exp())).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """[...] -> x / (1 + e^-x) of each number."""
    return _silu(_widened(x)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """[...] -> x Phi(x) of each number, Phi the distribution function of a normal distribution."""
    wide = _widened(x)
    return (wide * torch.erfc(-wide / math.sqrt(2)) / 2).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """[...] -> 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) of each number."""
    wide = _widened(x)
    return (0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).to(x.dtype)


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions [B, L] int64, inverse_frequencies [R] float32 -> cos and sin [B, L, 1, R] in ``dtype``.

    The phase is the product of the two in float32.
    """
    cos = torch.empty(*positions.shape, 1, len(inverse_frequencies), dtype=torch.float64)
    sin = torch.empty_like(cos)
    for b, row in enumerate(positions):
        for n, position in enumerate(row):
            for i, phase in enumerate((position.float() * inverse_frequencies).tolist()):
                cos[b, n, 0, i], sin[b, n, 0, i] = scaling * math.cos(phase), scaling * math.sin(phase)
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, L, H, D], cos and sin [B, L, 1, R] with R <= D: components i and i + R/2 of each head turn together."""
    y, half = _widened(x).clone(), cos.shape[-1] // 2
    for i in range(half):
        first, second = _widened(x[..., i]), _widened(x[..., i + half])
        y[..., i] = first * cos[..., i] - second * sin[..., i]
        y[..., i + half] = second * cos[..., i + half] + first * sin[..., i + half]
    return y.to(x.dtype)


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
    """Inputs of the gated delta rule: unit keys and queries, log decays and step sizes.

    mixed [B, L, C], of which the first 2 Hk K channels are queries and keys; a, b [B, L, Hv]; negative_a, dt_bias [Hv].
    Where decays are by key channel, a is [B, L, Hv, K] and dt_bias [Hv, K]. With a lower bound, g is
    lower_bound sigmoid(-negative_a (a + dt_bias)).

    Returns q = query / |query| / sqrt(K) and k = key / |key| [B, L, Hk, K], g = negative_a softplus(a + dt_bias) and
    beta = step_scale sigmoid(b) [B, L, Hv], all in mixed's dtype. Lengths have 1e-6 under the root.
    """
    size = num_key_heads * key_dim
    q, k = (x.unflatten(-1, (num_key_heads, key_dim)) for x in mixed[..., : 2 * size].split(size, -1))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    rate, step = negative_a if a.dim() == 3 else negative_a[:, None], a.to(mixed.dtype) + dt_bias
    g = rate * torch.log1p(torch.exp(step)) if lower_bound is None else lower_bound / (1 + torch.exp(rate * step))
    return q * key_dim**-0.5, k, g.to(mixed.dtype), step_scale / (1 + torch.exp(-b.to(mixed.dtype)))


def time_steps(raw: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """raw, x [T, C], bias [C] -> dt = softplus(raw + bias) and dt x, in x's dtype (arXiv 2312.00752, section 3.6)."""
    steps = torch.log1p(torch.exp(raw.to(x.dtype) + bias))
    return steps, steps * x


def skip_gate(y: Tensor, x: Tensor, skip: Tensor, gate: Tensor) -> Tensor:
    """y, x, gate [T, C], skip [C] -> (y + skip x) silu(gate), in the gate's dtype."""
    return ((y + skip * x) * _silu(_widened(gate))).to(gate.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
