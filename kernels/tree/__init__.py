"""Draft trees as tensors: ancestor masks, depths, convolution windows and the accepted path."""

from torch import Tensor

from specmamba.kernels.tree import native_ops, torch_ops
from specmamba.kernels.tree.torch_ops import ancestors, conv_index, depth

__all__ = ["accepted_path", "ancestors", "conv_index", "depth"]


def accepted_path(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, target_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the target's own choices down each tree; see ``torch_ops.accepted_path``."""
    if native_ops.can_take(tokens):
        return native_ops.accepted_path(tokens, parents, target_tokens)
    return torch_ops.accepted_path(tokens, parents, ancestors, target_tokens)
