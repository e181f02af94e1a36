"""Checkpoints without their weights: enough to say what a model is and what it takes."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.models.checkpoint import StoredTensor, TensorReader

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class ShapeReader(TensorReader):
    """A ``TensorReader`` whose tensors have shape and type, and no values: they are on PyTorch's meta device."""

    def _read(self, tensor: StoredTensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")


def have_same_values(x: Tensor, y: Tensor, guess: bool) -> bool:
    """Whether two tensors are equal; where one of them has no values and their shapes do not tell, the ``guess``."""
    return x.shape == y.shape and (guess if x.is_meta or y.is_meta else torch.equal(x, y))
