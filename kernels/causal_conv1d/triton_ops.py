"""Causal depthwise convolution in Triton, on pools in place; block sizes, and the variants compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.causal_conv1d import triton_kernels as kernels
from specmamba.kernels.gpu import Variant, dense, next_power_of_2, num_blocks
from specmamba.kernels.state_records.operands import Buffers, RecordOperands, SnapshotOperands, StateOperands, Trees


@dataclass(frozen=True)
class Tile:
    """Tokens and channels of one block of sums."""

    tokens: int
    channels: int
    num_warps: int
    num_stages: int = 1  # nothing to run ahead of: the loops are unrolled


# By tokens: chosen, not measured. A thread has 4 to 8 sums, what a warp reads of a token are whole sectors of 32 bytes,
# and one row of a layer of 8192 channels has some hundred programs.
_TILES = (Tile(1, 128, 1), Tile(8, 64, 2), Tile(16, 64, 8))
WINDOW_TILE = Tile(1, 256, 2)


def tile_for(num_tokens: int) -> Tile:
    """Choose the tile for the nodes of a tree or the tokens of a run; where one is too small, programs take several."""
    return next((tile for tile in _TILES if num_tokens <= tile.tokens), _TILES[-1])


def constexprs(tile: Tile, width: int, num_channels: int, tokens: str) -> dict[str, int]:
    """Block sizes of a launch; ``tokens`` is the kernel's letter for its token blocks: N (nodes) or T (tokens)."""
    channels = min(tile.channels, next_power_of_2(num_channels))
    return {"WIDTH": width, f"BLOCK_{tokens}": tile.tokens, "BLOCK_C": channels}


def advance(x: Tensor, weight: Tensor, bias: Tensor | None, state: StateOperands) -> Tensor:
    """Run the form that the operands ask for, on the pools in place."""
    if isinstance(state, RecordOperands):
        return tree_verify_in_place(x, state.buffers, state.trees, weight, bias)
    if isinstance(state, SnapshotOperands):
        y, after = tree_verify_snapshots(x, state.slots.take(state.windows), state.conv_index, weight, bias)
        state.rows.put_at(state.window_snapshots, 0, after)
        return y
    return extend_in_place(x, state.windows, state.slots.index, weight, state.lengths, bias)


def tree_verify_in_place(
    inputs: Tensor, buffers: Buffers, trees: Trees, weight: Tensor, bias: Tensor | None = None
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

    Returns:
        y [B, N, C] float32; zeros for rows of slot 0.
    """
    inputs, index, (batch, nodes, channels) = dense(inputs), dense(trees.conv_index), inputs.shape
    y = torch.empty(batch, nodes, channels, dtype=torch.float32, device=inputs.device)
    if y.numel() == 0:
        return y
    stored, windows = buffers.conv_inputs, buffers.windows if trees.folds is not None else None
    assert trees.folds is None or windows is not None, "rows that fold need a pool of windows"
    assert all(x.stride(2) == 1 for x in (stored, windows) if x is not None), "channels must be contiguous"
    tile = tile_for(nodes)
    sizes = constexprs(tile, weight.shape[1], channels, "N")
    slot_strides = (0, 0) if windows is None else windows.stride()[:2]
    kernels.tree_in_place_kernel[(batch, num_blocks(channels, sizes["BLOCK_C"]))](
        *(inputs, stored, windows, trees.rows, trees.slots, index, trees.num_pending, trees.folds),
        *(weight, bias, y, nodes, channels, trees.node_offset),
        *(*inputs.stride()[:2], *stored.stride()[:2], *slot_strides, *index.stride()[:2], *weight.stride()),
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def tree_verify_snapshots(
    x: Tensor, window: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve every node of a draft tree, and return the window after each; arguments as in ``torch_ops``."""
    x, window, index, (batch, nodes, channels) = dense(x), dense(window), dense(index), x.shape
    width = weight.shape[1]
    y = torch.empty(batch, nodes, channels, dtype=torch.float32, device=x.device)
    windows = torch.empty(batch, nodes, width - 1, channels, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y, windows
    tile = tile_for(nodes)
    sizes = constexprs(tile, width, channels, "N")
    kernels.tree_snapshots_kernel[(batch, num_blocks(channels, sizes["BLOCK_C"]), num_blocks(nodes, sizes["BLOCK_N"]))](
        *(x, window, index, weight, bias, y, windows, nodes, channels),
        *(*x.stride()[:2], *window.stride()[:2], *index.stride()[:2], *weight.stride()),
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y, windows


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
        y [B, L, C] float32; zeros on padding and for rows of slot 0.
    """
    x, (batch, length, channels) = dense(x), x.shape
    assert windows.stride(2) == 1, "channels must be contiguous"
    y = torch.empty(batch, length, channels, dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y
    tile, width = tile_for(length), weight.shape[1]
    sizes = constexprs(tile, width, channels, "T")
    strides = (*x.stride()[:2], *windows.stride()[:2])
    kernels.extend_kernel[(batch, num_blocks(length, sizes["BLOCK_T"]), num_blocks(channels, sizes["BLOCK_C"]))](
        *(x, windows, slots, lengths, weight, bias, y, length, channels, *strides, *weight.stride()),
        **sizes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    block = min(WINDOW_TILE.channels, next_power_of_2(channels))
    kernels.shift_windows_kernel[(batch, num_blocks(channels, block))](  # all programs above have read the old ones
        *(x, windows, slots, lengths, channels, *strides),
        WIDTH=width,
        BLOCK_C=block,
        num_warps=WINDOW_TILE.num_warps,
        num_stages=WINDOW_TILE.num_stages,
    )
    return y


def variants() -> list[Variant]:
    """The verify of either backend in both dtypes, over its tree sizes; and the two launches of a prefill."""
    trees = [("bf16", 1, False), ("bf16", 8, False), ("bf16", 16, True), ("fp32", 16, False)]
    return [
        *(_tree_variant(dtype, nodes, has_folds) for dtype, nodes, has_folds in trees),
        _snapshots_variant("bf16", 16),
        _extend_variant("bf16"),
        _extend_variant("fp32"),
        _shift_variant("bf16"),
    ]


def _tree_variant(dtype: str, nodes: int, has_folds: bool) -> Variant:
    pointers = {"inputs": dtype, "conv_inputs": dtype, "rows": "i64", "slots": "i64", "index": "i64", "weight": "fp32"}
    optional = {"windows": dtype, "num_pending": "i64", "folds": "i1"} if has_folds else {}
    sizes = constexprs(tile_for(nodes), 4, 8192, "N")
    name = f"tree_in_place {dtype} N={nodes}" + " folds" * has_folds
    return _variant(name, kernels.tree_in_place_kernel, {**pointers, **optional, "y": "fp32"}, sizes, nodes)


def _snapshots_variant(dtype: str, nodes: int) -> Variant:
    pointers = {"x": dtype, "window": dtype, "index": "i64", "weight": "fp32", "y": "fp32", "windows": dtype}
    sizes = constexprs(tile_for(nodes), 4, 8192, "N")
    return _variant(f"tree_snapshots {dtype} N={nodes}", kernels.tree_snapshots_kernel, pointers, sizes, nodes)


def _extend_variant(dtype: str) -> Variant:
    pointers = {"x": dtype, "windows": dtype, "slots": "i64", "lengths": "i64", "weight": "fp32", "bias": "fp32"}
    sizes = constexprs(tile_for(1024), 4, 8192, "T")
    return _variant(f"extend {dtype}", kernels.extend_kernel, {**pointers, "y": "fp32"}, sizes, 1024)


def _shift_variant(dtype: str) -> Variant:
    pointers = {"x": dtype, "windows": dtype, "slots": "i64", "lengths": "i64"}
    sizes = {"WIDTH": 4, "BLOCK_C": WINDOW_TILE.channels}
    return _variant(f"shift_windows {dtype}", kernels.shift_windows_kernel, pointers, sizes, None)


def _variant(name: str, kernel: Any, pointers: dict[str, str], sizes: dict[str, int], tokens: int | None) -> Variant:
    """Make a variant; arguments that are neither pointers nor block sizes are integers, or None where absent."""
    absent = {"bias", "windows", "num_pending", "folds"} - pointers.keys()
    constants: dict[str, Any] = {**sizes, **{x: None for x in kernel.arg_names if x in absent}}
    types = {x: f"*{pointers[x]}" if x in pointers else "i32" for x in kernel.arg_names}
    signature = {x: "constexpr" if x in constants else of for x, of in types.items()}
    tile = WINDOW_TILE if tokens is None else tile_for(tokens)
    return Variant(name, kernel, signature, constants, tile.num_warps, tile.num_stages)
