"""A Mamba2 layer between its projections: part by part, or over draft trees where the pools are."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.mamba2 import native_ops
from specmamba.kernels.mamba2.operands import Inputs, Weights
from specmamba.kernels.mamba2.torch_ops import compose
from specmamba.kernels.state_records.operands import Buffers, Trees

__all__ = ["Inputs", "Weights", "can_fuse", "compose", "tree_verify"]


def can_fuse(inputs: Inputs, weights: Weights, buffers: Buffers) -> bool:
    """Whether ``tree_verify`` takes these: Triton launches on a GPU, or one native call."""
    return gpu.can_launch(inputs.mixed, buffers.states) or native_ops.can_take(inputs, weights, buffers)


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """All nodes of draft trees, where ``can_fuse`` allows it; see ``triton_ops`` and ``native_ops``."""
    if gpu.can_launch(inputs.mixed, buffers.states):
        from specmamba.kernels.mamba2 import triton_ops

        return triton_ops.tree_verify(inputs, weights, buffers, trees)
    return native_ops.tree_verify(inputs, weights, buffers, trees)
