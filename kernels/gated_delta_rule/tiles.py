"""How the gated delta rule is cut into programs, and what is compiled of it ahead of time.

Blocks, warps and stages are chosen from register and shared-memory limits (64 KB of LDS on gfx942), not measured.
Narrow blocks of values make many programs out of few rows; what all blocks of a head compute again (products of keys
and queries) grows with their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specmamba.kernels.gpu import Variant
from specmamba.kernels.state_records.tiles import RECORDS, block, variant


@dataclass(frozen=True)
class Tile:
    """Of one program: tokens or nodes at a time, keys at a time, its share of the values, and what runs it."""

    tokens: int
    keys: int
    values: int
    num_warps: int
    num_stages: int = 1


def root_tile(key_dim: int, value_dim: int) -> Tile:
    """Trees of one node: the state is read once and used at once, so there have to be many loads under way."""
    keys = block(key_dim)
    return Tile(1, keys, block(value_dim, 32), num_warps=4 if keys <= 128 else 8)


def tree_tile(num_nodes: int, value_dim: int) -> Tile:
    """Larger trees: the nodes take the registers, the state passes through 16 keys at a time; with 32 some spill."""
    nodes = block(num_nodes)
    if nodes > 32:
        return Tile(nodes, 16, 16, num_warps=8)
    return Tile(nodes, 16, block(value_dim, 32), num_warps=4)


def extend_tile(key_dim: int, value_dim: int) -> Tile:
    """Known tokens, 32 at a time."""
    return Tile(32, block(key_dim, 32), block(value_dim, 32), num_warps=4)


def constexprs(kernel: Any, tile: Tile, key_dim: int, value_dim: int, group: int) -> dict[str, int]:
    """Those that a kernel of this op has, of all there are."""
    values = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "GROUP": group,
        "BLOCK_NODES": tile.tokens,
        "BLOCK_TOKENS": tile.tokens,
        "BLOCK_KEYS": tile.keys,
        "BLOCK_VALUES": tile.values,
        "BLOCK_RECORDS": RECORDS,
    }
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def variants() -> list[Variant]:
    """Trees of 1, 16 and 64 nodes, known tokens, snapshots; heads of 128, and of 64 and 256 where the tile changes."""
    from specmamba.kernels.gated_delta_rule import triton_kernels as kernels

    root, tree = kernels.root_kernel, kernels.tree_kernel
    return [
        _variant("tree_verify N=1", root, root_tile(128, 128), "fp32", 128),
        _variant("tree_verify N=1", root, root_tile(256, 128), "bf16", 256),
        _variant("tree_verify N=8", tree, tree_tile(8, 128), "bf16", 128),
        _variant("tree_verify N=16", tree, tree_tile(16, 128), "fp32", 64),
        _variant("tree_verify N=64", tree, tree_tile(64, 128), "fp32", 128),
        _variant("extend", kernels.extend_kernel, extend_tile(128, 128), "bf16", 128),
        _variant("extend", kernels.extend_kernel, extend_tile(256, 128), "fp32", 256),
        _variant("tree_verify_snapshots", kernels.snapshots_kernel, root_tile(128, 128), "fp32", 128),
    ]


POINTERS: Mapping[str, str] = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "out", "work", "snapshots"), "fp32"),
    **dict.fromkeys(("records_k", "records_u", "records_decay"), "fp32"),
    **dict.fromkeys(("rows", "slots", "num_pending", "parents", "lengths"), "i64"),
    **dict.fromkeys(("folds", "ancestors"), "i1"),
}


def _variant(what: str, kernel: Any, tile: Tile, state_dtype: str, key_dim: int) -> Variant:
    pointers = {name: POINTERS.get(name, state_dtype) for name in (*POINTERS, "state", "states")}
    taken = {name: of for name, of in pointers.items() if name in kernel.arg_names}
    constants: dict[str, Any] = constexprs(kernel, tile, key_dim, 128, 2)
    if state_dtype == "fp32" and taken.pop("work", ""):
        constants["work"] = None
    name = f"{what} {state_dtype} K={key_dim} V=128"
    return variant(name, kernel, taken, constants, tile.num_warps, tile.num_stages)
