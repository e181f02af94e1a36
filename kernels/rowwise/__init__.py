"""What is computed for each token on its own between matrix products: norms, gates, rotations."""

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.rowwise import native_ops, torch_ops

__all__ = ["delta_inputs", "gated_rms_norm", "rms_norm", "rotary_angles", "rotate", "silu_mul"]


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
    triton=lambda x, gate, weight, _: gpu.can_launch(x, gate, weight),
    native=lambda x, gate, weight, _: native_ops.can_take(gate, x, weight),
)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate): the norm comes before the gate (arXiv 2412.06464, section 3.4).

    Args:
        x: [..., H, D] float32.
        gate: [..., H, D].
        weight: [D] float32.
        eps: added to the mean of the squares.

    Returns:
        x's shape, the gate's dtype.

    Raises:
        ValueError: x, gate and weight differ in shape (native form).
    """
    return torch_ops.gated_rms_norm(x, gate, weight, eps)


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


@operator(
    triton=lambda mixed, a, b, negative_a, dt_bias, *_: gpu.can_launch(mixed, a, b, negative_a, dt_bias),
    native=lambda mixed, a, _, negative_a, dt_bias, *__: native_ops.can_take(a, mixed, negative_a, dt_bias),
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unit queries and keys, log decays and step sizes for the gated delta rule (arXiv 2412.06464, section 3.4).

    Args:
        mixed: [B, L, C] float32; its first 2 Hk K channels are queries and keys.
        a, b: [B, L, Hv].
        negative_a, dt_bias: [Hv] float32.
        num_key_heads, key_dim: Hk, K.
        step_scale: factor of beta.

    Returns:
        q (scaled by K**-0.5) and k [B, L, Hk, K], g and beta [B, L, Hv], all float32.

    Raises:
        ValueError: the operands differ in batch, length or heads (native form).
    """
    return torch_ops.delta_inputs(mixed, a, b, negative_a, dt_bias, num_key_heads, key_dim, step_scale)
