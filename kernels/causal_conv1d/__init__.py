"""Causal depthwise convolution with SiLU: over runs of tokens and over draft trees."""

from specmamba.kernels.causal_conv1d.torch_ops import extend, tree_verify, tree_verify_snapshots

__all__ = ["extend", "tree_verify", "tree_verify_snapshots"]
