"""Tokens and records whose log decays are from 0 to -3000, mixed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels.recurrent import test_gated_delta_rule, test_ssd
from tests.kernels.recurrent.records import Records, make_records

DECAYS = torch.tensor([0.0, -1e-6, -1e-3, -0.03, -0.5, -4.0, -30.0, -500.0, -3000.0])


def mixed(values: Tensor, shape: torch.Size, seed: int) -> Tensor:
    """One of the values in each place."""
    return values[torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))]


def make_tokens(name: str, batch: int, length: int, of: tuple[int, int, int, int], seed: int) -> Any:
    if name == "ssd":
        tokens: Any = test_ssd.make_tokens(batch, length, of, seed)
    else:
        tokens = test_gated_delta_rule.make_tokens(batch, length, of, seed)[0]
    return tokens._replace(g=mixed(DECAYS, tokens.g.shape, seed))


def pending_records(
    capacity: int,
    of: tuple[int, int, int, int],
    counts: Tensor,
    seed: int,
    decays: Tensor = DECAYS,
    has_channels: bool = False,
) -> Records:
    records = make_records(len(counts), capacity, of, counts, seed, has_channels)
    decay = records.decay
    is_pending = (torch.arange(capacity) < counts[:, None]).view(*decay.shape[:2], *[1] * (decay.dim() - 2))
    return records._replace(decay=torch.where(is_pending, mixed(decays, decay.shape, seed), decay))
