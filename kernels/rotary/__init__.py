"""Cosines and sines of rotary position embedding."""

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.rotary import native_ops, torch_ops

__all__ = ["angles"]


def angles(positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines at positions; see ``torch_ops.angles``."""
    if gpu.can_launch(positions, inverse_frequencies):
        from specmamba.kernels.rotary import triton_ops

        return triton_ops.angles(positions, inverse_frequencies, scaling, dtype)
    if native_ops.can_take(positions, inverse_frequencies, dtype):
        return native_ops.angles(positions, inverse_frequencies, scaling, dtype)
    return torch_ops.angles(positions, inverse_frequencies, scaling, dtype)
