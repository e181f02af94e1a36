"""Block sizes of the tree kernels, and what of them is compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specmamba.kernels.gpu import Variant, next_power_of_2

_SIZES = frozenset({"nodes", "width", "node_offset"})


@dataclass(frozen=True)
class Tile:
    """One program takes one tree: every block has its nodes, rounded up."""

    nodes: int
    num_warps: int
    num_stages: int = 1  # no loop loads anything ahead


def tile_for(num_nodes: int) -> Tile:
    """Chosen so that a thread has at most 32 entries of the mask; not measured."""
    nodes = max(next_power_of_2(num_nodes), 2)
    return Tile(nodes, num_warps=4 if nodes > 32 else 1)


def constexprs(tile: Tile) -> dict[str, int]:
    """Of every kernel here."""
    return {"BLOCK_N": tile.nodes}


def variants() -> list[Variant]:
    """The kernels that hold a whole mask at the largest tree; the short ones at a usual one."""
    from specmamba.kernels.tree import triton_kernels as kernels

    mask = {"mask": "*i1"}
    return [
        _variant("ancestors", kernels.ancestors_kernel, 64, mask),
        _variant("depth", kernels.depth_kernel, 64, mask),
        _variant("conv_index", kernels.conv_index_kernel, 16, {}),
        _variant("accepted_path", kernels.accepted_path_kernel, 16, mask),
        _variant("accepted_path", kernels.accepted_path_kernel, 64, mask),
        _variant("commit_moves", kernels.commit_moves_kernel, 16, {}),
        _variant("kv_moves", kernels.kv_moves_kernel, 16, {}),
    ]


def _variant(name: str, kernel: Any, nodes: int, types: dict[str, str]) -> Variant:
    tile = tile_for(nodes)
    sizes = constexprs(tile)
    scalars = {x: "i32" for x in kernel.arg_names if x in _SIZES or x.endswith("_stride")}
    known = types | scalars | dict.fromkeys(sizes, "constexpr")
    signature = {x: known.get(x, "*i64") for x in kernel.arg_names}
    strides = frozenset(scalars)  # of a tree's nodes, few and of any number
    return Variant(f"{name} N={nodes}", kernel, signature, sizes, tile.num_warps, tile.num_stages, strides)
