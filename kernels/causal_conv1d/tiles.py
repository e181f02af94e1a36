"""How the Triton kernels of the causal convolution are cut up, and which of them are compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specmamba.kernels.causal_conv1d import triton_kernels as kernels
from specmamba.kernels.gpu import Registers, Variant, next_power_of_2


@dataclass(frozen=True)
class Tile:
    """Tokens and channels of one block of sums."""

    tokens: int
    channels: int
    num_warps: int
    num_stages: int = 1  # nothing to run ahead of: the loops are unrolled
    registers: Registers | None = None


# By tokens: chosen, not measured. A thread has 4 to 8 sums, what a warp reads of a token are whole sectors of 32 bytes,
# and one row of a layer of 8192 channels has some hundred programs.
_TILES = (Tile(1, 128, 1), Tile(8, 64, 2), Tile(16, 64, 8))
_TWO_BLOCKS = Registers(128)  # of eight warps on a multiprocessor: ptxas of CUDA 12.8 spills trees for more, untold
WINDOW_TILE = Tile(1, 256, 2)


def tile_for(num_tokens: int) -> Tile:
    """Choose the tile for the nodes of a tree or the tokens of a run; where one is too small, programs take several."""
    return next((tile for tile in _TILES if num_tokens <= tile.tokens), _TILES[-1])


def tree_tile(num_nodes: int) -> Tile:
    """Choose the tile for trees whose inputs are kept, which may fold: the largest has a limit of registers."""
    tile = tile_for(num_nodes)
    return replace(tile, registers=_TWO_BLOCKS) if tile.num_warps == 8 else tile


def constexprs(tile: Tile, width: int, num_channels: int, tokens: str) -> dict[str, int]:
    """Block sizes of a launch; ``tokens`` is the kernel's letter for its token blocks: N (nodes) or T (tokens)."""
    channels = min(tile.channels, next_power_of_2(num_channels))
    return {"WIDTH": width, f"BLOCK_{tokens}": tile.tokens, "BLOCK_C": channels}


def variants() -> list[Variant]:
    """The verify of either backend in both dtypes, over its tree sizes; the two launches of a prefill; gated ones."""
    trees = [("bf16", 1, False), ("bf16", 8, False), ("bf16", 16, True), ("fp32", 16, False)]
    plain = [
        *(_tree_variant(dtype, nodes, has_folds) for dtype, nodes, has_folds in trees),
        _snapshots_variant("bf16", 16),
        _extend_variant("bf16"),
        _extend_variant("fp32"),
        _shift_variant("bf16"),
    ]
    gated = [_tree_variant("bf16", 8, False, True), _tree_variant("bf16", 16, True, True)]
    return [*plain, *gated, _extend_variant("bf16", True), _shift_variant("bf16", True)]


def _tree_variant(dtype: str, nodes: int, has_folds: bool, is_gated: bool = False) -> Variant:
    pointers = {"inputs": dtype, "conv_inputs": dtype, "rows": "i64", "slots": "i64", "index": "i64", "weight": "fp32"}
    optional = {"windows": dtype, "num_pending": "i64", "folds": "i1"} if has_folds else {}
    name = f"tree_in_place {dtype} N={nodes}" + " folds" * has_folds
    kernel = kernels.tree_in_place_kernel
    return _variant(name, kernel, {**pointers, **optional}, nodes, "N", dtype if is_gated else None)


def _snapshots_variant(dtype: str, nodes: int) -> Variant:
    pointers = {"x": dtype, "window": dtype, "index": "i64", "weight": "fp32", "windows": dtype}
    return _variant(f"tree_snapshots {dtype} N={nodes}", kernels.tree_snapshots_kernel, pointers, nodes, "N")


def _extend_variant(dtype: str, is_gated: bool = False) -> Variant:
    pointers = {"x": dtype, "windows": dtype, "slots": "i64", "lengths": "i64", "weight": "fp32"}
    pointers |= {} if is_gated else {"bias": "fp32"}
    return _variant(f"extend {dtype}", kernels.extend_kernel, pointers, 1024, "T", dtype if is_gated else None)


def _shift_variant(dtype: str, is_gated: bool = False) -> Variant:
    pointers = {"x": dtype, "windows": dtype, "slots": "i64", "lengths": "i64"}
    kernel = kernels.shift_windows_kernel
    return _variant(f"shift_windows {dtype}", kernel, pointers, None, "C", dtype if is_gated else None)


def _variant(
    name: str, kernel: Any, pointers: dict[str, str], tokens: int | None, blocks: str, gates: str | None = None
) -> Variant:
    """Make a variant; arguments that are neither pointers nor block sizes are integers, or None where absent.

    Args:
        name: of the variant; " gated" is added where it is.
        kernel: to compile.
        pointers: types of what they point to, without gates and outputs.
        tokens: of a launch; None: it moves windows.
        blocks: the kernel's letter for its token blocks.
        gates: their type, as in LFM2; None: there are none.
    """
    width, channels = (4, 8192) if gates is None else (3, 2048)
    choose = tree_tile if kernel is kernels.tree_in_place_kernel else tile_for
    tile = WINDOW_TILE if tokens is None else choose(tokens)
    sizes = {"WIDTH": width, "BLOCK_C": tile.channels} if tokens is None else constexprs(tile, width, channels, blocks)
    pointers |= {"y": gates or "fp32"} | ({} if gates is None else {"in_gate": gates, "gate": gates})
    absent = {"bias", "windows", "num_pending", "folds", "in_gate", "gate"} - pointers.keys()
    constants: dict[str, Any] = {**sizes, **{x: None for x in kernel.arg_names if x in absent}}
    types = {x: f"*{of}" for x, of in pointers.items()}
    made = Variant.of(name + " gated" * (gates is not None), kernel, types, constants, tile)
    return replace(made, registers=tile.registers)
