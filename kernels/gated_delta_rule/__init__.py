"""Gated delta rule: chunked prefill, tree verification from records, and the fold of pending records."""

from specmamba.kernels.gated_delta_rule.torch_ops import extend, fold, tree_verify

__all__ = ["extend", "fold", "tree_verify"]
