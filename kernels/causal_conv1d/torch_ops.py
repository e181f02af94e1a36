"""Causal depthwise convolution in vectorised PyTorch. See README.md."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels.state_records.operands import ExtendOperands, RecordOperands, SnapshotOperands, StateOperands


def advance(x: Tensor, weight: Tensor, bias: Tensor | None, state: StateOperands, has_silu: bool = True) -> Tensor:
    """Run the form that the operands ask for; consecutive rows of pools are views, others are copied.

    Without SiLU, here and in all forms, the sums themselves are the outputs.
    """
    if isinstance(state, RecordOperands):
        return _advance_with_records(x, weight, bias, state, has_silu)
    if isinstance(state, SnapshotOperands):
        window = state.slots.take(state.windows)
        y, after = tree_verify_snapshots(x, window, state.conv_index, weight, bias, has_silu)
        state.rows.put_at(state.window_snapshots, 0, after)
        return y
    assert isinstance(state, ExtendOperands)
    y, window = extend(x, state.slots.take(state.windows), weight, state.lengths, bias, has_silu)
    state.slots.put(state.windows, window)
    return y


def _advance_with_records(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: RecordOperands, has_silu: bool
) -> Tensor:
    first = weight.shape[1] - 1 + state.trees.node_offset
    inputs = state.rows.take(state.buffers.conv_inputs)[:, : first + x.shape[1]]
    inputs[:, first:] = x
    if not state.rows.is_range:  # the inputs were written to a copy
        state.rows.put_at(state.buffers.conv_inputs, first, x)
    return tree_verify(inputs, state.trees.conv_index, weight, bias, has_silu)


def extend(
    x: Tensor, window: Tensor, weight: Tensor, lengths: Tensor, bias: Tensor | None = None, has_silu: bool = True
) -> tuple[Tensor, Tensor]:
    """Convolve runs of known tokens, each behind its stored window, and apply SiLU.

    Args:
        x: [B, L, C].
        window: [B, W-1, C], the last inputs before x, oldest first; not modified.
        weight: [C, W].
        lengths: [B] int64; tokens from lengths[b] on are padding.
        bias: [C], added before SiLU.
        has_silu: whether SiLU is applied.

    Returns:
        y [B, L, C] float32 (unspecified on padding) and the new window [B, W-1, C].
    """
    inputs = torch.cat([window.to(x.dtype), x], 1)
    y = F.conv1d(inputs.transpose(1, 2).float(), weight.float()[:, None], bias, groups=x.shape[2])
    last = lengths[:, None] + torch.arange(window.shape[1], device=x.device)
    new_window = inputs.gather(1, last[..., None].expand(-1, -1, x.shape[2]))
    return (F.silu(y) if has_silu else y).transpose(1, 2), new_window


def tree_verify(
    inputs: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None = None, has_silu: bool = True
) -> Tensor:
    """Convolve every node of a draft tree over its last W-1 ancestors and apply SiLU.

    Args:
        inputs: [B, E, C]: stored window, pending inputs and node inputs of each row.
        index: [B, N, W] int64: the rows of ``inputs`` under each node's kernel, oldest first.
        weight: [C, W].
        bias: [C], added before SiLU.
        has_silu: whether SiLU is applied.

    Returns:
        y [B, N, C] float32.
    """
    return _convolve(_gather(inputs, index), weight, bias, has_silu)


def tree_verify_snapshots(
    x: Tensor, window: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None = None, has_silu: bool = True
) -> tuple[Tensor, Tensor]:
    """Convolve every node of a draft tree over its last W-1 ancestors, and give the window after each node.

    Args:
        x: [B, N, C], the nodes' inputs.
        window: [B, W-1, C], the last inputs before the tree, oldest first; not modified.
        index: [B, N, W] int64: the rows of (window, x) under each node's kernel, oldest first, the node itself last.
        weight: [C, W].
        bias: [C], added before SiLU.
        has_silu: whether SiLU is applied.

    Returns:
        y [B, N, C] float32 and the windows [B, N, W-1, C] that the nodes leave to their children.
    """
    rows = _gather(torch.cat([window.to(x.dtype), x], 1), index)
    return _convolve(rows, weight, bias, has_silu), rows[:, :, 1:]


def _gather(inputs: Tensor, index: Tensor) -> Tensor:
    """inputs [B, E, C], index [B, N, W] -> [B, N, W, C]."""
    batch, num_nodes, width = index.shape
    if batch == 1:
        return inputs[0].index_select(0, index.reshape(-1)).view(1, num_nodes, width, -1)
    return inputs[torch.arange(batch, device=index.device)[:, None, None], index]


def _convolve(rows: Tensor, weight: Tensor, bias: Tensor | None, has_silu: bool) -> Tensor:
    """Weighted sum over rows [B, N, W, C], then perhaps SiLU: [B, N, C] float32."""
    total = (rows * weight.t().float()).sum(2)
    total = total if bias is None else total + bias
    return F.silu(total) if has_silu else total
