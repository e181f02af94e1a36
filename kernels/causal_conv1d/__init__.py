"""Causal depthwise convolution with SiLU: over runs of tokens and over draft trees."""

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.causal_conv1d import torch_ops
from specmamba.kernels.causal_conv1d.torch_ops import extend, tree_verify

__all__ = ["extend", "extend_in_place", "tree_verify", "tree_verify_snapshots"]


def extend_in_place(
    x: Tensor, windows: Tensor, slots: Tensor, weight: Tensor, lengths: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Convolve runs of known tokens, each behind the window in its slot, apply SiLU, and leave the window after them.

    Args:
        x: [B, L, C].
        windows: [slots, W - 1, C]; rows of length 0 and rows of slot 0 leave theirs as it is.
        slots: [B] int64, distinct but for 0.
        weight: [C, W].
        lengths: [B] int64; tokens from lengths[b] on are padding.
        bias: [C], added before SiLU.

    Returns:
        y [B, L, C] float32; unspecified on padding and for rows of slot 0.
    """
    if gpu.can_launch(x, windows, slots, weight, lengths, bias):
        from specmamba.kernels.causal_conv1d import triton_ops

        return triton_ops.extend_in_place(x, windows, slots, weight, lengths, bias)
    before = windows.index_select(0, slots)
    y, after = torch_ops.extend(x, before, weight, lengths, bias)
    is_kept = (slots == 0)[:, None, None]
    windows.index_copy_(0, slots, torch.where(is_kept, before, after.to(windows.dtype)))
    return y


def tree_verify_snapshots(
    x: Tensor, window: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve every node, and give the window after each; see ``torch_ops.tree_verify_snapshots``."""
    if gpu.can_launch(x, window, index, weight, bias):
        from specmamba.kernels.causal_conv1d import triton_ops

        return triton_ops.tree_verify_snapshots(x, window, index, weight, bias)
    return torch_ops.tree_verify_snapshots(x, window, index, weight, bias)
