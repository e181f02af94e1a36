"""What is computed for each token on its own between matrix products: norms, gates, rotations."""

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.rowwise import native_ops, torch_ops

__all__ = [
    "add_rms_norm",
    "clamped_silu_mul",
    "delta_inputs",
    "gate_heads",
    "gated_rms_norm",
    "gelu",
    "gelu_tanh",
    "rms_norm",
    "rotary_angles",
    "rotate",
    "sigmoid",
    "silu",
    "silu_mul",
    "skip_gate",
    "time_steps",
]


@operator(
    triton=lambda x, weight, _: gpu.can_launch(x, weight),
    native=lambda x, weight, _: native_ops.can_take(x, weight),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (root mean square normalization, arXiv 1910.07467, section 4).

    Args:
        x: [..., D] or [..., H, D].
        weight: [D] or [H, D] float32.
        eps: added to the mean of the squares.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: the weight has another shape (native form).
    """
    return torch_ops.rms_norm(x, weight, eps)


@operator(
    triton=lambda x, added, weight, _: x.dtype is added.dtype and gpu.can_launch(x, added, weight),
    native=lambda x, added, weight, _: x.dtype is added.dtype and native_ops.can_take(x, weight),
)
def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added, rounded to their dtype, and ``rms_norm`` of that: a residual stream and the input of its next layer.

    Args:
        x, added: [..., D] of one dtype.
        weight: [D] float32.
        eps: added to the mean of the squares.

    Returns:
        The sum and its norm, both in x's shape and dtype: the bits of an addition and ``rms_norm`` one after the other.

    Raises:
        ValueError: x, added and weight differ in shape (native form).
    """
    return torch_ops.add_rms_norm(x, added, weight, eps)


@operator(
    triton=lambda x, gate, weight, *_: gpu.can_launch(x, gate, weight),
    native=lambda x, gate, weight, *_: native_ops.can_take(gate, x, weight),
)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False) -> Tensor:
    """rms_norm(x) * silu(gate): the norm comes before the gate (arXiv 2412.06464, section 3.4).

    Args:
        x: [..., H, D] float32.
        gate: [..., H, D].
        weight: [D] float32.
        eps: added to the mean of the squares.
        is_sigmoid: sigmoid(gate) in place of silu(gate).

    Returns:
        x's shape, the gate's dtype.

    Raises:
        ValueError: x, gate and weight differ in shape (native form).
    """
    return torch_ops.gated_rms_norm(x, gate, weight, eps, is_sigmoid)


@operator(triton=gpu.can_launch, native=native_ops.can_take)
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, the gated activation of an MLP (arXiv 2002.05202, section 2).

    Args:
        gate_up: [..., 2 I], gates first.

    Returns:
        [..., I] in gate_up's dtype.

    Raises:
        ValueError: the last dimension is odd (native form).
    """
    return torch_ops.silu_mul(gate_up)


@operator(native=lambda gate_up, _: native_ops.can_take(gate_up))
def clamped_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    """min(silu(gate), limit) * clip(up, -limit, limit), computed in float32 and rounded once.

    Args:
        gate_up: [..., 2 I], gates first.
        limit: > 0.

    Returns:
        [..., I] in gate_up's dtype.

    Raises:
        ValueError: the last dimension is odd (native form).
    """
    return torch_ops.clamped_silu_mul(gate_up, limit)


@operator(native=native_ops.can_take)
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), computed in float32 and rounded once.

    Args:
        x: [...].

    Returns:
        x's shape and dtype.
    """
    return torch_ops.sigmoid(x)


@operator(native=native_ops.can_take)
def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), computed in float32 and rounded once (arXiv 1702.03118, section 2).

    Args:
        x: [..., D].

    Returns:
        x's shape and dtype.
    """
    return torch_ops.silu(x)


@operator(native=native_ops.can_take)
def gelu(x: Tensor) -> Tensor:
    """x times the share of a normal distribution below x, computed in float32 and rounded once (arXiv 1606.08415).

    Args:
        x: [..., D].

    Returns:
        x's shape and dtype.
    """
    return torch_ops.gelu(x)


@operator(native=native_ops.can_take)
def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is nearly ``gelu`` (arXiv 1606.08415, section 2).

    Args:
        x: [..., D].

    Returns:
        x's shape and dtype.
    """
    return torch_ops.gelu_tanh(x)


@operator(triton=lambda x, gates: x.dtype is gates.dtype and gpu.can_launch(x, gates))
def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """x * sigmoid(gates), with a gate for each head: the gate is rounded to the dtype of both, and so is the product.

    Args:
        x: [B, L, H, D].
        gates: [B, L, H] of the same dtype.

    Returns:
        x's shape and dtype, the bits of ``sigmoid`` and a product behind it, but for Triton's e^x.
    """
    return x * sigmoid(gates)[..., None]


@operator(
    triton=lambda positions, inverse_frequencies, *_: gpu.can_launch(positions, inverse_frequencies),
    native=lambda positions, frequencies, _, dtype: native_ops.can_take_angles(positions, frequencies, dtype),
)
def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines at positions, computed in float32 (RoFormer, arXiv 2104.09864, section 3.4).

    Args:
        positions: [B, L] int64.
        inverse_frequencies: [R] float32; its second half repeats the first.
        scaling: factor of the results.
        dtype: of the results.

    Returns:
        cos and sin, [B, L, 1, R] each.

    Raises:
        ValueError: operands have another dtype, or R is odd (native form).
    """
    return torch_ops.rotary_angles(positions, inverse_frequencies, scaling, dtype)


@operator(triton=gpu.can_launch, native=lambda x, *_: native_ops.can_take(x))
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R components of heads (rotary position embedding, arXiv 2104.09864, section 3.4).

    Component i is paired with component i + R / 2, not with its neighbour.

    Args:
        x: [B, L, H, D].
        cos, sin: [B, L, 1, R], R <= D, in x's dtype.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: cos or sin have another shape or dtype, or R is odd (native form).
    """
    return torch_ops.rotate(x, cos, sin)


def _is_by_head(a: Tensor, lower_bound: float | None) -> bool:
    """Whether decays are those of Gated DeltaNet: a number for each head, without a bound."""
    return a.dim() == 3 and lower_bound is None


@operator(
    triton=lambda mixed, a, b, negative_a, dt_bias, *_: gpu.can_launch(mixed, a, b, negative_a, dt_bias),
    native=lambda mixed, a, _, negative_a, dt_bias, *rest: (
        _is_by_head(a, rest[-1]) and native_ops.can_take(a, mixed, negative_a, dt_bias)
    ),
)
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
    """Unit queries and keys, log decays and step sizes for the gated delta rule (arXiv 2412.06464, section 3.4).

    With decays for each key channel they are those of Kimi Delta Attention (arXiv 2510.26692), which native code has as
    a part of ``delta_net`` alone.

    Args:
        mixed: [B, L, C] float32; its first 2 Hk K channels are queries and keys.
        a: [B, L, Hv] or [B, L, Hv, K].
        b: [B, L, Hv].
        negative_a: [Hv] float32.
        dt_bias: [Hv] or [Hv, K] float32.
        num_key_heads, key_dim: Hk, K.
        step_scale: factor of beta.
        lower_bound: of log decays, which then are lower_bound sigmoid(-negative_a (a + dt_bias)) in place of
            negative_a softplus(a + dt_bias).

    Returns:
        q (scaled by K**-0.5) and k [B, L, Hk, K], g in the shape of a, beta [B, L, Hv], all float32.

    Raises:
        ValueError: the operands differ in batch, length or heads (native form).
    """
    heads = num_key_heads, key_dim
    return torch_ops.delta_inputs(mixed, a, b, negative_a, dt_bias, *heads, step_scale, lower_bound)


@operator(triton=gpu.can_launch, native=native_ops.can_take)
def time_steps(raw: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Time steps of Mamba1 and its input times these (arXiv 2312.00752, section 3.2 and 3.6).

    Args:
        raw: [B, L, C], what the layer projects for them.
        bias: [C] float32.
        x: [B, L, C] float32, the convolved input.

    Returns:
        dt = softplus(raw + bias) and dt x, [B, L, C] float32 each.

    Raises:
        ValueError: the operands differ in shape (native form).
    """
    return torch_ops.time_steps(raw, bias, x)


@operator(triton=gpu.can_launch, native=lambda y, x, skip, gate: native_ops.can_take(gate, y, x, skip))
def skip_gate(y: Tensor, x: Tensor, skip: Tensor, gate: Tensor) -> Tensor:
    """(y + skip x) silu(gate): what a Mamba1 layer makes of the outputs of its scan (arXiv 2312.00752, figure 3).

    Args:
        y, x: [B, L, C] float32, outputs of the scan and its convolved input.
        skip: [C] float32, D.
        gate: [B, L, C].

    Returns:
        [B, L, C] in the gate's dtype, rounded once.

    Raises:
        ValueError: the operands differ in shape (native form).
    """
    return torch_ops.skip_gate(y, x, skip, gate)
