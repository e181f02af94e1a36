"""Records of recurrent states for tests, whichever layer they come from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# (Hk, Hv, K, V): equal heads, grouped heads, narrow and odd widths
HEADS = [(1, 1, 8, 8), (2, 4, 16, 24), (1, 3, 7, 5), (4, 4, 32, 32)]
WIDE_HEADS = [(2, 4, 64, 64), (1, 2, 128, 128), (2, 2, 100, 72), (1, 2, 128, 64), (1, 3, 33, 80), (2, 2, 16, 200)]


class Records(NamedTuple):
    """Record buffers of a batch, in the argument order of the ops."""

    k: Tensor  # [B, R, Hk, K]
    u: Tensor  # [B, R, Hv, V]
    decay: Tensor  # [B, R, Hv]

    def clone(self, dtype: torch.dtype = torch.float32) -> Records:
        return Records(*(x.to(dtype, copy=True) for x in self))


def make_state(batch: int, heads: tuple[int, int, int, int], seed: int) -> Tensor:
    """Checkpoints [B, Hv, K, V]."""
    return torch.randn(batch, *heads[1:], generator=torch.Generator().manual_seed(seed))


def make_records(
    batch: int, capacity: int, heads: tuple[int, int, int, int], num_pending: Tensor, seed: int
) -> Records:
    """Plausible pending records; all the others hold finite rubbish that overflows if it is exponentiated."""
    (hk, hv, key_dim, value_dim), gen = heads, torch.Generator().manual_seed(seed)
    k = torch.nn.functional.normalize(torch.randn(batch, capacity, hk, key_dim, generator=gen), dim=-1)
    u = torch.randn(batch, capacity, hv, value_dim, generator=gen)
    g = -torch.nn.functional.softplus(torch.randn(batch, capacity, hv, generator=gen) - 1)
    pending = torch.arange(capacity) < num_pending[:, None]
    return Records(
        torch.where(pending[..., None, None], k, 1e3),
        torch.where(pending[..., None, None], u, -1e3),
        torch.where(pending[..., None], g.cumsum(1), 500.0),
    )
