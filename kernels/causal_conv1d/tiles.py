"""Block sizes of the convolution's Triton kernels, and what of them is compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specmamba.kernels.gpu import Variant, next_power_of_2

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
    """Of the nodes of a tree, or of a run's tokens; more than a tile has are taken one tile after the other."""
    return next((tile for tile in _TILES if num_tokens <= tile.tokens), _TILES[-1])


def constexprs(tile: Tile, width: int, num_channels: int, tokens: str) -> dict[str, int]:
    """Of a launch; ``tokens`` is the kernel's own name for its blocks of them, N or T."""
    channels = min(tile.channels, next_power_of_2(num_channels))
    return {"WIDTH": width, f"BLOCK_{tokens}": tile.tokens, "BLOCK_C": channels}


def variants() -> list[Variant]:
    """The verify of either backend in both dtypes, over its tree sizes; and the two launches of a prefill."""
    trees = [("bf16", 1, False), ("bf16", 8, False), ("bf16", 16, True), ("fp32", 16, False)]
    return [
        *(_tree(dtype, nodes, has_folds) for dtype, nodes, has_folds in trees),
        _snapshots("bf16", 16),
        _extend("bf16"),
        _extend("fp32"),
        _shift("bf16"),
    ]


def _tree(dtype: str, nodes: int, has_folds: bool) -> Variant:
    from specmamba.kernels.causal_conv1d import triton_kernels

    pointers = {"inputs": dtype, "conv_inputs": dtype, "rows": "i64", "slots": "i64", "index": "i64", "weight": "fp32"}
    optional = {"windows": dtype, "num_pending": "i64", "folds": "i1"} if has_folds else {}
    sizes = constexprs(tile_for(nodes), 4, 8192, "N")
    name = f"tree_in_place {dtype} N={nodes}" + " folds" * has_folds
    return _variant(name, triton_kernels.tree_in_place_kernel, {**pointers, **optional, "y": "fp32"}, sizes, nodes)


def _snapshots(dtype: str, nodes: int) -> Variant:
    from specmamba.kernels.causal_conv1d import triton_kernels

    pointers = {"x": dtype, "window": dtype, "index": "i64", "weight": "fp32", "y": "fp32", "windows": dtype}
    sizes = constexprs(tile_for(nodes), 4, 8192, "N")
    return _variant(f"tree_snapshots {dtype} N={nodes}", triton_kernels.tree_snapshots_kernel, pointers, sizes, nodes)


def _extend(dtype: str) -> Variant:
    from specmamba.kernels.causal_conv1d import triton_kernels

    pointers = {"x": dtype, "windows": dtype, "slots": "i64", "lengths": "i64", "weight": "fp32", "bias": "fp32"}
    sizes = constexprs(tile_for(1024), 4, 8192, "T")
    return _variant(f"extend {dtype}", triton_kernels.extend_kernel, {**pointers, "y": "fp32"}, sizes, 1024)


def _shift(dtype: str) -> Variant:
    from specmamba.kernels.causal_conv1d import triton_kernels

    pointers = {"x": dtype, "windows": dtype, "slots": "i64", "lengths": "i64"}
    sizes = {"WIDTH": 4, "BLOCK_C": WINDOW_TILE.channels}
    return _variant(f"shift_windows {dtype}", triton_kernels.shift_windows_kernel, pointers, sizes, None)


def _variant(name: str, kernel: Any, pointers: dict[str, str], sizes: dict[str, int], tokens: int | None) -> Variant:
    """Arguments that are neither pointers nor block sizes: strides and sizes, or, where they may be None, None."""
    absent = {"bias", "windows", "num_pending", "folds"} - pointers.keys()
    constants: dict[str, Any] = {**sizes, **{x: None for x in kernel.arg_names if x in absent}}
    types = {x: f"*{pointers[x]}" if x in pointers else "i32" for x in kernel.arg_names}
    signature = {x: "constexpr" if x in constants else of for x, of in types.items()}
    tile = WINDOW_TILE if tokens is None else tile_for(tokens)
    return Variant(name, kernel, signature, constants, tile.num_warps, tile.num_stages)
