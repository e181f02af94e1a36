"""Draft trees in Triton: one launch per operation, one program per tree. See README.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.gpu import Variant, dense, next_power_of_2
from specmamba.kernels.tree import triton_kernels as kernels

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
    """Constants of every kernel here."""
    return {"BLOCK_N": tile.nodes}


def ancestors(parents: Tensor) -> Tensor:
    """At most 64 nodes; a parent that is not smaller than its node counts as none."""
    parents, (batch, nodes) = dense(parents), parents.shape
    mask = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=parents.device)
    _launch(kernels.ancestors_kernel, batch, nodes, parents, mask, nodes, parents.stride(0))
    return mask


def depth(ancestors: Tensor) -> Tensor:
    """The number of ancestors."""
    mask, (batch, nodes, _) = dense(ancestors), ancestors.shape
    depths = torch.empty(batch, nodes, dtype=torch.int64, device=mask.device)
    _launch(kernels.depth_kernel, batch, nodes, mask, depths, nodes, *mask.stride()[:2])
    return depths


def conv_index(parents: Tensor, width: int) -> Tensor:
    """A parent that is not smaller than its node counts as none."""
    parents, (batch, nodes) = dense(parents), parents.shape
    index = torch.empty(batch, nodes, width, dtype=torch.int64, device=parents.device)
    _launch(kernels.conv_index_kernel, batch, nodes, parents, index, nodes, width, parents.stride(0))
    return index


def accepted_path(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, target_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One program walks one tree."""
    tokens, parents, target_tokens = dense(tokens), dense(parents), dense(target_tokens)
    mask, (batch, nodes) = dense(ancestors), tokens.shape
    path, path_tokens = tokens.new_empty(batch, nodes), tokens.new_empty(batch, nodes + 1)
    num_accepted, bonus = tokens.new_empty(batch), tokens.new_empty(batch)
    strides = tokens.stride(0), parents.stride(0), *mask.stride()[:2], target_tokens.stride(0)
    inputs, outputs = (tokens, parents, mask, target_tokens), (path, num_accepted, path_tokens, bonus)
    _launch(kernels.accepted_path_kernel, batch, nodes, *inputs, *outputs, nodes, *strides)
    return outputs


def commit_moves(path: Tensor, num_accepted: Tensor, node_offset: int, num_pending: Tensor) -> tuple[Tensor, Tensor]:
    """One program per tree."""
    path, (batch, nodes) = dense(path), path.shape
    counts = num_accepted.contiguous(), num_pending.contiguous()
    source, target = path.new_empty(batch, nodes), path.new_empty(batch, nodes)
    _launch(
        kernels.commit_moves_kernel, batch, nodes, path, *counts, source, target, nodes, node_offset, path.stride(0)
    )
    return source, target


def kv_moves(path: Tensor, num_accepted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """One program per tree."""
    path, slots, (batch, nodes) = dense(path), dense(slots), path.shape
    source, target = path.new_empty(batch, nodes), path.new_empty(batch, nodes)
    strides = path.stride(0), slots.stride(0)
    _launch(
        kernels.kv_moves_kernel, batch, nodes, path, num_accepted.contiguous(), slots, source, target, nodes, *strides
    )
    return source, target


def _launch(kernel: Any, batch: int, nodes: int, *arguments: Tensor | int) -> None:
    tile = tile_for(nodes)
    if batch:
        gpu.launch(kernel, (batch,), tile, constexprs(tile), *arguments)


def variants() -> list[Variant]:
    """The kernels that hold a whole mask at the largest tree; the short ones at a usual one."""
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
    scalars = {x: "i32" for x in kernel.arg_names if x in _SIZES or x.endswith("_stride")}
    strides = frozenset(scalars)  # of a tree's nodes, few and of any number
    return Variant.of(f"{name} N={nodes}", kernel, types | scalars, constexprs(tile), tile, strides, other="*i64")
