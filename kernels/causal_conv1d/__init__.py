"""Causal depthwise convolution with SiLU: over runs of tokens and over draft trees."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.causal_conv1d import native_ops, torch_ops
from specmamba.kernels.dispatch import operator
from specmamba.kernels.state_records.operands import SnapshotOperands, StateOperands, refuse_exact

__all__ = ["advance"]


@operator(triton=lambda *args: gpu.can_launch(args[0], args[-1].states), native=native_ops.can_take)
def advance(x: Tensor, weight: Tensor, bias: Tensor | None, state: StateOperands) -> Tensor:
    """Convolve tokens with the W - 1 tokens before each, on a tree along its own path, and apply SiLU.

    Args:
        x: [B, L, C], any float dtype.
        weight: [C, W] float32.
        bias: [C] float32, added before SiLU.
        state: known tokens leave the window after them in their slots; the L nodes of draft trees leave their inputs
            in the buffers, or a window after each.

    Returns:
        [B, L, C] float32; unspecified on padding.

    Raises:
        ValueError: shapes do not fit each other (native form).
        RuntimeError: states are exact, and native code does not take the operands.
    """
    refuse_exact(not isinstance(state, SnapshotOperands) and state.is_exact)
    return torch_ops.advance(x, weight, bias, state)
