"""Draft trees as tensors: ancestor masks, depths, convolution windows, the accepted path and what it moves.

Nodes are in topological order: parents[b, i] < i; node 0 is the root with parent -1. Any other node with parent -1 is
padding: its own only ancestor, and never accepted. Token trees and their verification: arXiv 2305.09781, section 4.
"""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.tree import native_ops, torch_ops

MAX_NODES = 64  # of trees that Triton kernels take: a node's ancestors are the bits of one integer

__all__ = ["accepted_path", "ancestors", "commit_moves", "conv_index", "depth", "kv_moves"]


def _can_launch(of_nodes: Tensor, *_: object) -> bool:
    return 0 < of_nodes.shape[1] <= MAX_NODES and gpu.can_launch(of_nodes)


@operator(triton=_can_launch, native=native_ops.can_take)
def ancestors(parents: Tensor) -> Tensor:
    """Inclusive ancestor mask.

    Args:
        parents: [B, N] int64. Parents are trusted: one that is not smaller than its node is not detected.

    Returns:
        [B, N, N] bool; [b, i, j] when j is i or an ancestor of i.

    Raises:
        ValueError: parents are not int64 (native form).
    """
    return torch_ops.ancestors(parents)


@operator(triton=_can_launch)
def depth(ancestors: Tensor) -> Tensor:
    """Depth of each node below the root.

    Args:
        ancestors: [B, N, N] bool, the inclusive mask.

    Returns:
        [B, N] int64; 0 for the root and for padding nodes.
    """
    return torch_ops.depth(ancestors)


@operator(triton=_can_launch, native=lambda parents, _: native_ops.can_take(parents))
def conv_index(parents: Tensor, width: int) -> Tensor:
    """The inputs under each node's convolution kernel, oldest first.

    Args:
        parents: [B, N] int64.
        width: kernel width W.

    Returns:
        [B, N, W] int64: the node itself last; entries >= 0 are nodes; -1 is the newest input before the root, -2 the
        one before it, and so on. A padding node has the inputs of a root.
    """
    return torch_ops.conv_index(parents, width)


@operator(triton=_can_launch, native=lambda tokens, *_: native_ops.can_take(tokens))
def accepted_path(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, target_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the target's own choices down each tree, to the deepest node that agrees; the lowest index on ties.

    Args:
        tokens: [B, N] int64, the drafts; tokens[:, 0] are the roots.
        parents: [B, N] int64.
        ancestors: [B, N, N] bool.
        target_tokens: [B, N] int64, the target's choice after each node.

    Returns:
        path [B, N] int64 (node indices from the root to the deepest accepted node, which then repeats),
        num_accepted [B] int64 (the root not counted),
        path_tokens [B, N + 1] int64 (tokens of path[1:], the bonus token, and the bonus token again as padding),
        bonus [B] int64 (the target's choice after the last accepted node).

    Raises:
        ValueError: tokens, parents and choices differ in shape, or are not int64 (native form).
    """
    return torch_ops.accepted_path(tokens, parents, ancestors, target_tokens)


@operator(triton=_can_launch, native=lambda path, *_: native_ops.can_take(path))
def commit_moves(path: Tensor, num_accepted: Tensor, node_offset: int, num_pending: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a row's records that an accepted path moves, for ``state_copy.compact``.

    Args:
        path: [B, N] int64, num_accepted: [B] int64; from ``accepted_path``.
        node_offset: the entry of node 0.
        num_pending: [B] int64, entries in front that stay.

    Returns:
        source, target [B, N] int64: step s goes from node_offset + path[b, s] to num_pending[b] + s; the steps behind
        the last accepted one repeat the move of step 0, so that every move can be made.
    """
    return torch_ops.commit_moves(path, num_accepted, node_offset, num_pending)


@operator(triton=_can_launch, native=lambda path, *_: native_ops.can_take(path))
def kv_moves(path: Tensor, num_accepted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The KV slots that an accepted path moves.

    Args:
        path: [B, N] int64, num_accepted: [B] int64; from ``accepted_path``.
        slots: [B, N] int64, of the nodes.

    Returns:
        source, target [B, N] int64: step s goes from slots[b, path[b, s]] to slots[b, s]; the steps behind the last
        accepted one move slot 0, which is padding, onto itself.
    """
    return torch_ops.kv_moves(path, num_accepted, slots)
