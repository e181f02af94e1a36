"""Causal depthwise convolution with SiLU: over runs of tokens and over draft trees."""

from torch import Tensor

from specmamba.kernels.causal_conv1d import native_ops, torch_ops
from specmamba.kernels.causal_conv1d.torch_ops import extend, tree_verify_snapshots

__all__ = ["extend", "tree_verify", "tree_verify_snapshots"]


def tree_verify(inputs: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Convolve every node of a draft tree over its last W-1 ancestors; see ``torch_ops.tree_verify``."""
    if native_ops.can_take(inputs, weight):
        return native_ops.tree_verify(inputs, index, weight)
    return torch_ops.tree_verify(inputs, index, weight)
