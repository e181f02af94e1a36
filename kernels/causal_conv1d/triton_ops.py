"""Causal depthwise convolution in Triton, on pools in place."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.causal_conv1d import triton_kernels as kernels
from specmamba.kernels.causal_conv1d.tiles import WINDOW_TILE, constexprs, tile_for, tree_tile
from specmamba.kernels.gpu import dense, next_power_of_2, num_blocks, register_options
from specmamba.kernels.state_records.operands import Buffers, RecordOperands, SnapshotOperands, StateOperands, Trees

Gates = tuple[Tensor, Tensor]  # of inputs and of outputs, parts of the same projection as the inputs


def advance(x: Tensor, weight: Tensor, bias: Tensor | None, state: StateOperands) -> Tensor:
    """Run the form that the operands ask for, on the pools in place."""
    return advance_gated(x, weight, bias, state, None)


def advance_gated(x: Tensor, weight: Tensor, bias: Tensor | None, state: StateOperands, gates: Gates | None) -> Tensor:
    """The same, or, with gates, ``short_conv.advance``: they multiply inputs and sums, and there is no SiLU."""
    if isinstance(state, RecordOperands):
        return tree_verify_in_place(x, state.buffers, state.trees, weight, bias, gates)
    if isinstance(state, SnapshotOperands):
        y, after = tree_verify_snapshots(x, state.slots.take(state.windows), state.conv_index, weight, bias, gates)
        state.rows.put_at(state.window_snapshots, 0, after)
        return y
    return extend_in_place(x, state.windows, state.slots.index, weight, state.lengths, bias, gates)


def tree_verify_in_place(
    inputs: Tensor,
    buffers: Buffers,
    trees: Trees,
    weight: Tensor,
    bias: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """Convolve every node of a verify's trees and apply SiLU; keep the inputs; move the windows of rows that fold.

    Node i's input goes to entry W - 1 + node_offset + i of its row of ``buffers.conv_inputs``, rounded to their dtype.
    Where ``trees.folds``, the last W - 1 pending inputs become the window, in the row and in ``buffers.windows``.
    Nothing is read or written for rows of slot 0.

    Args:
        inputs: [B, N, C].
        buffers: ``conv_inputs`` and, where a row folds, ``windows``; the others are not read.
        trees: ``ancestors`` are not read.
        weight: [C, W].
        bias: [C], added before SiLU.
        gates: [B, N, C] each, or None.

    Returns:
        y [B, N, C] float32, or as the gates; zeros for rows of slot 0.
    """
    (inputs, in_gate, gate), index = _alike(inputs, gates), dense(trees.conv_index)
    batch, nodes, channels = inputs.shape
    y = _empty_output(inputs, gates)
    if y.numel() == 0:
        return y
    stored, windows = buffers.conv_inputs, buffers.windows if trees.folds is not None else None
    assert trees.folds is None or windows is not None, "rows that fold need a pool of windows"
    assert all(x.stride(2) == 1 for x in (stored, windows) if x is not None), "channels must be contiguous"
    tile = tree_tile(nodes)
    sizes = constexprs(tile, weight.shape[1], channels, "N")
    slot_strides = (0, 0) if windows is None else windows.stride()[:2]
    kernels.tree_in_place_kernel[(batch, num_blocks(channels, sizes["BLOCK_C"]))](
        *(inputs, in_gate, gate, stored, windows, trees.rows, trees.slots, index, trees.num_pending, trees.folds),
        *(weight, bias, y, nodes, channels, trees.node_offset),
        *(*inputs.stride()[:2], *stored.stride()[:2], *slot_strides, *index.stride()[:2], *weight.stride()),
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **register_options(tile.registers, y.device),
    )
    return y


def tree_verify_snapshots(
    x: Tensor,
    window: Tensor,
    index: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gates: Gates | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve every node of a draft tree, and return the window after each; other arguments as in ``torch_ops``."""
    (x, in_gate, gate), window, index = _alike(x, gates), dense(window), dense(index)
    (batch, nodes, channels), width = x.shape, weight.shape[1]
    y = _empty_output(x, gates)
    windows = torch.empty(batch, nodes, width - 1, channels, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y, windows
    tile = tile_for(nodes)
    sizes = constexprs(tile, width, channels, "N")
    kernels.tree_snapshots_kernel[(batch, num_blocks(channels, sizes["BLOCK_C"]), num_blocks(nodes, sizes["BLOCK_N"]))](
        *(x, in_gate, gate, window, index, weight, bias, y, windows, nodes, channels),
        *(*x.stride()[:2], *window.stride()[:2], *index.stride()[:2], *weight.stride()),
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y, windows


def extend_in_place(
    x: Tensor,
    windows: Tensor,
    slots: Tensor,
    weight: Tensor,
    lengths: Tensor,
    bias: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """Convolve runs of known tokens, each behind the window in its slot, apply SiLU, and leave the window after them.

    Args:
        x: [B, L, C].
        windows: [slots, W - 1, C]; rows of length 0 and rows of slot 0 leave theirs as it is.
        slots: [B] int64, distinct but for 0.
        weight: [C, W].
        lengths: [B] int64; tokens from lengths[b] on are padding.
        bias: [C], added before SiLU.
        gates: [B, L, C] each, or None.

    Returns:
        y [B, L, C] float32, or as the gates; zeros on padding and for rows of slot 0.
    """
    (x, in_gate, gate), (batch, length, channels) = _alike(x, gates), x.shape
    assert windows.stride(2) == 1, "channels must be contiguous"
    y = _empty_output(x, gates)
    if y.numel() == 0:
        return y
    tile, width = tile_for(length), weight.shape[1]
    sizes = constexprs(tile, width, channels, "T")
    strides = (*x.stride()[:2], *windows.stride()[:2])
    kernels.extend_kernel[(batch, num_blocks(length, sizes["BLOCK_T"]), num_blocks(channels, sizes["BLOCK_C"]))](
        *(x, in_gate, gate, windows, slots, lengths, weight, bias, y, length, channels, *strides, *weight.stride()),
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    block = min(WINDOW_TILE.channels, next_power_of_2(channels))
    kernels.shift_windows_kernel[(batch, num_blocks(channels, block))](  # all programs above have read the old ones
        *(x, in_gate, windows, slots, lengths, channels, *strides),
        WIDTH=width,
        BLOCK_C=block,
        num_warps=WINDOW_TILE.num_warps,
        num_stages=WINDOW_TILE.num_stages,
    )
    return y


def _alike(x: Tensor, gates: Gates | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Inputs and gates with the same strides, whose neighbours in the last dimension are neighbours in memory."""
    if gates is None:
        return dense(x), None, None
    if not (x.stride(-1) == 1 and x.stride() == gates[0].stride() == gates[1].stride()):
        x, gates = x.contiguous(), (gates[0].contiguous(), gates[1].contiguous())
    return x, *gates


def _empty_output(x: Tensor, gates: Gates | None) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32 if gates is None else x.dtype, device=x.device)
