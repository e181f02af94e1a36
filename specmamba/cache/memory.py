"""Memory of pools."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes of a cache line, and of the widest vector


def lazy_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on a CPU only once they are written.

    A pool is as large as it may ever get. PyTorch's own zeros are written at once; NumPy's come from the system, which
    hands out a page at its first use.
    """
    if device.type != "cpu":
        return torch.zeros(*size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[offset : offset + num_bytes]).view(dtype).view(*size)
