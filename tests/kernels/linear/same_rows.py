"""Rows of products that are the same numbers, wherever they stand in their batch."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_rows(found: Tensor, want: Tensor) -> None:
    """Compare bit by bit. Under the interpreter products are numpy's, and of some CPUs a row depends on its place."""
    if found.is_cpu:
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, want)
