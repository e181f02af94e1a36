"""Draft trees in native code (native.cpp): each operator is one call for many small ones. See README.md."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import contiguous_from, require

SOURCE = Path(__file__).parent / "native.cpp"


def can_take(tokens: Tensor) -> bool:
    """Whether native code walks these trees: those on the CPU."""
    return tokens.is_cpu and code() is not None


def ancestors(parents: Tensor) -> Tensor:
    """Each node's row is its parent's and itself; a parent that is not smaller than its node counts as none."""
    batch, nodes = parents.shape
    require(parents.dtype is torch.int64, "nodes are int64")
    parents = contiguous_from(parents, 1)
    mask = torch.empty(batch, nodes, nodes, dtype=torch.bool)
    library.required(code()).tree_ancestors(parents.data_ptr(), mask.data_ptr(), batch, nodes, parents.stride(0))
    return mask


def accepted_path(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,  # noqa: ARG001 -- all forms of an operator have the same parameters
    target_tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One walk from the root; a parent that is not smaller than its node counts as none."""
    native = library.required(code())
    batch, nodes = tokens.shape
    shapes, dtypes = {x.shape for x in (tokens, parents, target_tokens)}, {tokens.dtype, parents.dtype}
    require(len(shapes) == 1 and nodes > 0, "tokens, parents and choices differ in shape")
    require(dtypes == {torch.int64} and target_tokens.dtype is torch.int64, "nodes and tokens are int64")
    tokens, target_tokens, parents = tokens.contiguous(), target_tokens.contiguous(), contiguous_from(parents, 1)
    path, path_tokens = torch.empty_like(tokens), tokens.new_empty(batch, nodes + 1)
    num_accepted, bonus = tokens.new_empty(2, batch)
    inputs, outputs = (tokens, parents, target_tokens), (path, num_accepted, path_tokens, bonus)
    native.tree_accepted_path(*(x.data_ptr() for x in (*inputs, *outputs)), batch, nodes, parents.stride(0))
    return outputs


def conv_index(parents: Tensor, width: int) -> Tensor:
    """One walk up for each node; a parent that is not smaller than its node counts as none."""
    batch, nodes = parents.shape
    require(parents.dtype is torch.int64, "nodes are int64")
    parents = contiguous_from(parents, 1)
    index = torch.empty(batch, nodes, width, dtype=torch.int64)
    pointers = parents.data_ptr(), index.data_ptr()
    library.required(code()).tree_conv_index(*pointers, batch, nodes, width, parents.stride(0))
    return index


def commit_moves(path: Tensor, num_accepted: Tensor, node_offset: int, num_pending: Tensor) -> tuple[Tensor, Tensor]:
    """One call."""
    batch, nodes = path.shape
    path, num_accepted, num_pending = _moves_of(path, num_accepted, num_pending)
    source, target = torch.empty_like(path), torch.empty_like(path)
    pointers = (x.data_ptr() for x in (path, num_accepted, num_pending, source, target))
    library.required(code()).tree_commit_moves(*pointers, node_offset, batch, nodes)
    return source, target


def kv_moves(path: Tensor, num_accepted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """One call; a path's node that there is not is IndexError's in PyTorch, and the first node here."""
    batch, nodes = path.shape
    require(slots.shape == path.shape, "path and slots differ in shape")
    path, num_accepted, slots = _moves_of(path, num_accepted, slots)
    source, target = torch.empty_like(path), torch.empty_like(path)
    pointers = (x.data_ptr() for x in (path, num_accepted, slots, source, target))
    library.required(code()).tree_kv_moves(*pointers, batch, nodes)
    return source, target


def _moves_of(path: Tensor, num_accepted: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    operands = path, num_accepted, other
    require(all(x.dtype is torch.int64 and x.is_cpu for x in operands), "paths, counts and slots are int64 on the CPU")
    require(len(num_accepted) == len(other) == len(path), "paths, counts and slots differ in rows")
    return path.contiguous(), num_accepted.contiguous(), other.contiguous()


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    sizes = [c_int64] * 3
    signatures = {
        "tree_accepted_path": [*[c_void_p] * 7, *sizes],
        "tree_ancestors": [*[c_void_p] * 2, *sizes],
        "tree_conv_index": [*[c_void_p] * 2, *[c_int64] * 4],
        "tree_commit_moves": [*[c_void_p] * 5, *sizes],
        "tree_kv_moves": [*[c_void_p] * 5, *[c_int64] * 2],
    }
    return library.load_functions(SOURCE, signatures)
