"""A gated delta net layer between its projections: part by part, or over draft trees in one call."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.delta_net import native_ops
from specmamba.kernels.delta_net.operands import Inputs, Weights
from specmamba.kernels.delta_net.torch_ops import compose
from specmamba.kernels.state_records.operands import Buffers, Trees

__all__ = ["Inputs", "Weights", "can_fuse", "compose", "tree_verify"]


def can_fuse(inputs: Inputs, weights: Weights, buffers: Buffers) -> bool:
    """Whether ``tree_verify`` takes these: all of them on a GPU, on a CPU what native code takes."""
    return gpu.can_launch(inputs.mixed, buffers.states) or native_ops.can_take(inputs, weights, buffers)


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """All of a layer over draft trees, where ``can_fuse`` allows it: ``reference.tree_verify``.

    Only on a GPU may rows fold and states be narrower than float32.
    """
    if gpu.can_launch(inputs.mixed, buffers.states):
        from specmamba.kernels.delta_net import triton_ops

        return triton_ops.tree_verify(inputs, weights, buffers, trees)
    return native_ops.tree_verify(inputs, weights, buffers, trees)
