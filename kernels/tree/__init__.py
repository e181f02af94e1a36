"""Draft trees as tensors: ancestor masks, depths, convolution windows and the accepted path."""

from specmamba.kernels.tree.torch_ops import accepted_path, ancestors, conv_index, depth

__all__ = ["accepted_path", "ancestors", "conv_index", "depth"]
