"""Cosines and sines of rotary position embedding."""

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.rotary import native_ops, torch_ops

__all__ = ["angles"]


@operator(
    triton=lambda positions, inverse_frequencies, *_: gpu.can_launch(positions, inverse_frequencies),
    native=lambda positions, frequencies, _, dtype: native_ops.can_take(positions, frequencies, dtype),
)
def angles(positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
    return torch_ops.angles(positions, inverse_frequencies, scaling, dtype)
