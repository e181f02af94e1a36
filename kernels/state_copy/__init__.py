"""Moves rows inside the per-request buffers."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.state_copy import torch_ops
from specmamba.kernels.state_copy.torch_ops import needed

__all__ = ["compact", "needed"]


def compact(buffer: Tensor, rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Move entries inside rows of a buffer; see ``torch_ops.compact``."""
    if gpu.can_launch(buffer):
        from specmamba.kernels.state_copy import triton_ops

        return triton_ops.compact(buffer, rows, source, target)
    return torch_ops.compact(buffer, rows, source, target)
