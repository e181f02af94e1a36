"""Attention over keys and values that live anywhere in a pool."""

from specmamba.kernels.paged_attention.torch_ops import attend

__all__ = ["attend"]
