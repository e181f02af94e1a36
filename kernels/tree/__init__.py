"""Draft trees as tensors: ancestor masks, depths, convolution windows, the accepted path and what it moves."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.tree import native_ops, torch_ops

MAX_NODES = 64  # of trees that Triton kernels take: a node's ancestors are the bits of one integer

__all__ = ["accepted_path", "ancestors", "commit_moves", "conv_index", "depth", "kv_moves"]


def ancestors(parents: Tensor) -> Tensor:
    """The inclusive ancestor mask; see ``torch_ops.ancestors``."""
    if _can_launch(parents):
        from specmamba.kernels.tree import triton_ops

        return triton_ops.ancestors(parents)
    return torch_ops.ancestors(parents)


def depth(ancestors: Tensor) -> Tensor:
    """Depth of each node below the root; see ``torch_ops.depth``."""
    if _can_launch(ancestors):
        from specmamba.kernels.tree import triton_ops

        return triton_ops.depth(ancestors)
    return torch_ops.depth(ancestors)


def conv_index(parents: Tensor, width: int) -> Tensor:
    """The inputs under each node's convolution kernel; see ``torch_ops.conv_index``."""
    if _can_launch(parents):
        from specmamba.kernels.tree import triton_ops

        return triton_ops.conv_index(parents, width)
    return torch_ops.conv_index(parents, width)


def accepted_path(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, target_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the target's own choices down each tree; see ``torch_ops.accepted_path``."""
    if _can_launch(tokens):
        from specmamba.kernels.tree import triton_ops

        return triton_ops.accepted_path(tokens, parents, ancestors, target_tokens)
    if native_ops.can_take(tokens):
        return native_ops.accepted_path(tokens, parents, target_tokens)
    return torch_ops.accepted_path(tokens, parents, ancestors, target_tokens)


def commit_moves(path: Tensor, num_accepted: Tensor, node_offset: int, num_pending: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a row's records that an accepted path moves; see ``torch_ops.commit_moves``."""
    if _can_launch(path):
        from specmamba.kernels.tree import triton_ops

        return triton_ops.commit_moves(path, num_accepted, node_offset, num_pending)
    return torch_ops.commit_moves(path, num_accepted, node_offset, num_pending)


def kv_moves(path: Tensor, num_accepted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The KV slots that an accepted path moves; see ``torch_ops.kv_moves``."""
    if _can_launch(path):
        from specmamba.kernels.tree import triton_ops

        return triton_ops.kv_moves(path, num_accepted, slots)
    return torch_ops.kv_moves(path, num_accepted, slots)


def _can_launch(of_nodes: Tensor) -> bool:
    return 0 < of_nodes.shape[1] <= MAX_NODES and gpu.can_launch(of_nodes)
