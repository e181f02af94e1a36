"""State space duality, the recurrence of Mamba2: chunked prefill and tree verification from records."""

from specmamba.kernels.ssd.torch_ops import extend, tree_verify, tree_verify_snapshots

__all__ = ["extend", "tree_verify", "tree_verify_snapshots"]
