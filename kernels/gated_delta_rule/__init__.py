"""Gated delta rule: chunked prefill and tree verification from records or with snapshots."""

from specmamba.kernels.gated_delta_rule.torch_ops import extend, tree_verify, tree_verify_snapshots

__all__ = ["extend", "tree_verify", "tree_verify_snapshots"]
