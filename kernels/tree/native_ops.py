"""Ancestors and the accepted path in native code (native.cpp): one call for two dozen small ones. See README.md."""

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


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    sizes = [c_int64] * 3
    signatures = {"tree_accepted_path": [*[c_void_p] * 7, *sizes], "tree_ancestors": [c_void_p, c_void_p, *sizes]}
    return library.load_functions(SOURCE, signatures)
