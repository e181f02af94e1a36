"""Moves rows inside the per-request buffers."""

from specmamba.kernels.state_copy.torch_ops import compact

__all__ = ["compact"]
