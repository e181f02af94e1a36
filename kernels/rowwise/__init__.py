"""What is done to each token on its own between matrix products: norms, gates, rotations."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.rowwise import native_ops, torch_ops

__all__ = ["delta_inputs", "gated_rms_norm", "rms_norm", "rotate", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight; see ``torch_ops.rms_norm``."""
    if gpu.can_launch(x, weight):
        from specmamba.kernels.rowwise import triton_ops

        return triton_ops.rms_norm(x, weight, eps)
    if native_ops.can_take(x, weight):
        return native_ops.rms_norm(x, weight, eps)
    return torch_ops.rms_norm(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate); see ``torch_ops.gated_rms_norm``."""
    if gpu.can_launch(x, gate, weight):
        from specmamba.kernels.rowwise import triton_ops

        return triton_ops.gated_rms_norm(x, gate, weight, eps)
    if native_ops.can_take(gate, x, weight):
        return native_ops.gated_rms_norm(x, gate, weight, eps)
    return torch_ops.gated_rms_norm(x, gate, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; see ``torch_ops.silu_mul``."""
    if gpu.can_launch(gate_up):
        from specmamba.kernels.rowwise import triton_ops

        return triton_ops.silu_mul(gate_up)
    if native_ops.can_take(gate_up):
        return native_ops.silu_mul(gate_up)
    return torch_ops.silu_mul(gate_up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; see ``torch_ops.rotate``."""
    if gpu.can_launch(x, cos, sin):
        from specmamba.kernels.rowwise import triton_ops

        return triton_ops.rotate(x, cos, sin)
    if native_ops.can_take(x):
        return native_ops.rotate(x, cos, sin)
    return torch_ops.rotate(x, cos, sin)


def delta_inputs(
    mixed: Tensor, a: Tensor, b: Tensor, negative_a: Tensor, dt_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, decays and step sizes of the gated delta rule; see ``torch_ops.delta_inputs``."""
    if gpu.can_launch(mixed, a, b, negative_a, dt_bias):
        from specmamba.kernels.rowwise import triton_ops

        return triton_ops.delta_inputs(mixed, a, b, negative_a, dt_bias, num_key_heads, key_dim)
    if native_ops.can_take(a, mixed, negative_a, dt_bias):
        return native_ops.delta_inputs(mixed, a, b, negative_a, dt_bias, num_key_heads, key_dim)
    return torch_ops.delta_inputs(mixed, a, b, negative_a, dt_bias, num_key_heads, key_dim)
