"""A Mamba2 layer between its projections: all of it in one native call, or its parts beside the recurrence."""

from typing import TypeGuard

from torch import Tensor

from specmamba.kernels import gpu, ssd
from specmamba.kernels.dispatch import operator
from specmamba.kernels.mamba2 import native_ops, torch_ops
from specmamba.kernels.mamba2.native_ops import extend, tree_verify
from specmamba.kernels.mamba2.operands import Inputs, Weights
from specmamba.kernels.state_records import ExtendOperands, RecordOperands, RowSet, StateOperands
from specmamba.kernels.tree import MAX_NODES

__all__ = [
    "Inputs",
    "Weights",
    "can_extend",
    "can_fuse",
    "extend",
    "gate_and_norm",
    "step",
    "step_and_advance",
    "tree_verify",
]

ONE_BLOCK = 64  # channels up to which so few programs have a head that each may make its products again


def can_fuse(state: StateOperands, inputs: Inputs, weights: Weights) -> TypeGuard[RecordOperands]:
    """Whether ``tree_verify`` takes these operands: draft trees with records, in memory that native code reads."""
    if not isinstance(state, RecordOperands) or gpu.can_launch_any(
        ("causal_conv1d", "mamba2", "ssd"), inputs.mixed, state.states
    ):
        return False  # Triton runs the layer operator by operator, and folds in the same launches
    return native_ops.can_take(inputs, weights, state.buffers)


def can_extend(state: StateOperands, inputs: Inputs, weights: Weights) -> TypeGuard[ExtendOperands]:
    """Whether ``extend`` takes these operands: known tokens, in memory that native code reads."""
    return isinstance(state, ExtendOperands) and native_ops.can_take_runs(inputs, weights, state)


@operator(triton=lambda dt, mixed, _: gpu.can_launch(dt, mixed))
def step(dt: Tensor, mixed: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Step sizes, softplus(dt + bias) within the limits, and with them the inputs of the recurrence.

    Args:
        dt: [B, L, H], any float dtype.
        mixed: [B, L, C] float32, x in the first H P channels.
        weights: of the layer.

    Returns:
        u = dt x [B, L, H, P] and the log decays g = dt A [B, L, H], float32.
    """
    return torch_ops.step(dt, mixed, weights)


def _shares_products(dt: Tensor, mixed: Tensor, weights: Weights, state: StateOperands) -> bool:
    """Whether products of C and B are needed by several programs that Triton runs: it makes them once then."""
    if not isinstance(state, RecordOperands) or not gpu.is_chosen("ssd"):
        return False
    if not 1 < state.trees.num_nodes <= MAX_NODES or state.trees.is_short_chain:
        return False
    is_shared = weights.num_heads > weights.num_groups or weights.head_dim > ONE_BLOCK
    return is_shared and gpu.can_launch(dt, mixed, state.states)


@operator(triton=_shares_products)
def step_and_advance(dt: Tensor, mixed: Tensor, weights: Weights, state: StateOperands) -> Tensor:
    """Step sizes, and with them the recurrence over a layer's convolved channels.

    Args:
        dt: [B, L, H], any float dtype.
        mixed: [B, L, C] float32: x, B, C.
        weights: of the layer.
        state: as in ``ssd.advance``.

    Returns:
        Outputs [B, L, H, P] float32, as ``ssd.advance`` has them.
    """
    u, g = step(dt, mixed, weights)
    b, c = weights.groups_of(mixed)
    return ssd.advance(c, b, u, g, state)


@operator(triton=lambda recurred, mixed, gate, *_: gpu.can_launch(recurred, mixed, gate))
def gate_and_norm(recurred: Tensor, mixed: Tensor, gate: Tensor, weights: Weights, slots: RowSet) -> Tensor:
    """Add D x, multiply by silu(gate), and norm in groups before or after it, or not at all (arXiv 2405.21060, sec. 7).

    Args:
        recurred: [B, L, H, P] float32, contiguous.
        mixed: [B, L, C] float32, x in the first H P channels.
        gate: [B, L, H P], any float dtype.
        weights: of the layer; without a norm there is the gate alone.
        slots: B state slots; rows of slot 0 are padding, which Triton skips.

    Returns:
        [B, L, H P] in the gate's dtype; unspecified on padding.
    """
    return torch_ops.gate_and_norm(recurred, mixed, gate, weights, slots)
