"""A gated delta net layer between its projections, over draft trees or known tokens, in one native call."""

from typing import TypeGuard

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.delta_net import native_ops, torch_ops
from specmamba.kernels.delta_net.native_ops import extend, tree_verify
from specmamba.kernels.delta_net.operands import Inputs, Weights
from specmamba.kernels.dispatch import operator
from specmamba.kernels.state_records import ExtendOperands, RecordOperands, StateOperands

__all__ = ["Inputs", "Weights", "can_extend", "can_fuse", "extend", "gate_and_advance", "tree_verify"]

ONE_BLOCK = 64  # values up to which one program may have a whole head


def can_fuse(state: StateOperands, inputs: Inputs, weights: Weights) -> TypeGuard[RecordOperands]:
    """Whether ``tree_verify`` takes these operands: draft trees with records, in memory that native code reads."""
    if not isinstance(state, RecordOperands) or gpu.can_launch_any(
        ("causal_conv1d", "gated_delta_rule"), inputs.mixed, state.states
    ):
        return False  # Triton runs the layer operator by operator, and folds in the same launches
    return native_ops.can_take(inputs, weights, state.buffers)


def can_extend(state: StateOperands, inputs: Inputs, weights: Weights) -> TypeGuard[ExtendOperands]:
    """Whether ``extend`` takes these operands: known tokens, in memory that native code reads."""
    return isinstance(state, ExtendOperands) and native_ops.can_take_runs(inputs, weights, state)


def _shares_products(mixed: Tensor, a: Tensor, _b: Tensor, weights: Weights, state: StateOperands) -> bool:
    """Whether products of keys are needed by several programs that Triton runs: it makes them once then."""
    if not isinstance(state, RecordOperands) or a.dim() != 3:  # decays by channel are inside of products
        return False
    if state.trees.num_nodes == 1 or state.trees.is_short_chain or not gpu.is_chosen("gated_delta_rule"):
        return False
    is_shared = weights.num_value_heads > weights.num_key_heads or weights.value_dim > ONE_BLOCK
    return is_shared and gpu.can_launch(mixed, a, state.states)


@operator(triton=_shares_products)
def gate_and_advance(mixed: Tensor, a: Tensor, b: Tensor, weights: Weights, state: StateOperands) -> Tensor:
    """The gated delta rule on a layer's convolved channels: gates, unit queries and keys, recurrence.

    Args:
        mixed: [B, L, C] float32, behind the convolution.
        a: [B, L, Hv] or [B, L, Hv, K], decay before its softplus.
        b: [B, L, Hv], beta before its sigmoid.
        weights: of the layer.
        state: as in ``gated_delta_rule.advance``.

    Returns:
        Outputs [B, L, Hv, V] float32, as ``gated_delta_rule.advance`` has them.
    """
    return torch_ops.gate_and_advance(mixed, a, b, weights, state)
