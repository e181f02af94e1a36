"""The sampling settings of a batch as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.core import SamplingParams


@dataclass(frozen=True, slots=True)
class Penalties:
    """Strengths, all [B] float32; neutral for rows without penalties."""

    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Settings of a batch, all [B]; None where no row uses them, so that their work is skipped."""

    temperature: Tensor | None  # float32; None: all greedy
    top_k: Tensor | None  # int64
    top_p: Tensor | None  # float32
    min_p: Tensor | None  # float32
    seeds: Tensor  # int64
    penalties: Penalties | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> SamplingBatch:
        """Collect the settings of a batch's requests."""

        def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

        sampled = [p for p in params if not p.is_greedy]
        penalties = None
        if any(p.has_penalties for p in params):
            penalties = Penalties(column("presence_penalty"), column("frequency_penalty"), column("repetition_penalty"))
        return cls(
            temperature=column("temperature") if sampled else None,
            top_k=column("top_k", torch.int64) if any(p.top_k > 0 for p in sampled) else None,
            top_p=column("top_p") if any(p.top_p < 1 for p in sampled) else None,
            min_p=column("min_p") if any(p.min_p > 0 for p in sampled) else None,
            seeds=torch.tensor(seeds, dtype=torch.int64, device=device),
            penalties=penalties,
        )
