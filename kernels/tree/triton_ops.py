"""Draft trees in Triton: one launch an operation, one program a tree. See README.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.tree import triton_kernels as kernels
from specmamba.kernels.tree.tiles import constexprs, tile_for


def ancestors(parents: Tensor) -> Tensor:
    """At most 64 nodes; a parent that is not smaller than its node counts as none."""
    parents, (batch, nodes) = _dense(parents), parents.shape
    mask = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=parents.device)
    _launch(kernels.ancestors_kernel, batch, nodes, parents, mask, nodes, parents.stride(0))
    return mask


def depth(ancestors: Tensor) -> Tensor:
    """The number of ancestors."""
    mask, (batch, nodes, _) = _dense(ancestors), ancestors.shape
    depths = torch.empty(batch, nodes, dtype=torch.int64, device=mask.device)
    _launch(kernels.depth_kernel, batch, nodes, mask, depths, nodes, *mask.stride()[:2])
    return depths


def conv_index(parents: Tensor, width: int) -> Tensor:
    """A parent that is not smaller than its node counts as none."""
    parents, (batch, nodes) = _dense(parents), parents.shape
    index = torch.empty(batch, nodes, width, dtype=torch.int64, device=parents.device)
    _launch(kernels.conv_index_kernel, batch, nodes, parents, index, nodes, width, parents.stride(0))
    return index


def accepted_path(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, target_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One program walks one tree."""
    tokens, parents, target_tokens = _dense(tokens), _dense(parents), _dense(target_tokens)
    mask, (batch, nodes) = _dense(ancestors), tokens.shape
    path, path_tokens = tokens.new_empty(batch, nodes), tokens.new_empty(batch, nodes + 1)
    num_accepted, bonus = tokens.new_empty(batch), tokens.new_empty(batch)
    strides = tokens.stride(0), parents.stride(0), *mask.stride()[:2], target_tokens.stride(0)
    inputs, outputs = (tokens, parents, mask, target_tokens), (path, num_accepted, path_tokens, bonus)
    _launch(kernels.accepted_path_kernel, batch, nodes, *inputs, *outputs, nodes, *strides)
    return outputs


def commit_moves(path: Tensor, num_accepted: Tensor, node_offset: int, num_pending: Tensor) -> tuple[Tensor, Tensor]:
    """One program per tree."""
    path, (batch, nodes) = _dense(path), path.shape
    counts = num_accepted.contiguous(), num_pending.contiguous()
    source, target = path.new_empty(batch, nodes), path.new_empty(batch, nodes)
    _launch(
        kernels.commit_moves_kernel, batch, nodes, path, *counts, source, target, nodes, node_offset, path.stride(0)
    )
    return source, target


def kv_moves(path: Tensor, num_accepted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """One program per tree."""
    path, slots, (batch, nodes) = _dense(path), _dense(slots), path.shape
    source, target = path.new_empty(batch, nodes), path.new_empty(batch, nodes)
    strides = path.stride(0), slots.stride(0)
    _launch(
        kernels.kv_moves_kernel, batch, nodes, path, num_accepted.contiguous(), slots, source, target, nodes, *strides
    )
    return source, target


def _launch(kernel: Any, batch: int, nodes: int, *arguments: Tensor | int) -> None:
    tile = tile_for(nodes)
    if batch:
        kernel[(batch,)](*arguments, **constexprs(tile), num_warps=tile.num_warps, num_stages=tile.num_stages)


def _dense(x: Tensor) -> Tensor:
    """With neighbouring elements of the last dimension; rows may lie anywhere, or all in one place."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
