"""A gated delta net layer between its projections: part by part, or over draft trees in one native call."""

from specmamba.kernels.delta_net.native_ops import can_take as can_fuse
from specmamba.kernels.delta_net.native_ops import tree_verify
from specmamba.kernels.delta_net.operands import Inputs, Weights
from specmamba.kernels.delta_net.torch_ops import compose

__all__ = ["Inputs", "Weights", "can_fuse", "compose", "tree_verify"]
