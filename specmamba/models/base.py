"""What the engine asks of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specmamba.cache.shapes import CacheShape
from specmamba.layers.context import ForwardContext


class Target(Protocol):
    """The model that decides."""

    vocab_size: int
    hidden_size: int

    def forward(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """Tokens [B, L] int64 -> hidden states after the final norm [B, L, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""


class DraftHead(Protocol):
    """A head that guesses from the target's hidden states: MTP.

    Entry t takes the hidden state of position t-1 and the token at t, and guesses the token at t+1. Its keys and values
    live in the target's KV pool, at the token's own position, so a shared prefix shares them too.
    """

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Tokens [B, L] and hidden states [B, L, H] of the positions before them -> the head's own [B, L, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory."""

    architecture: str
    target: Target
    draft_head: DraftHead | None
    cache_shape: CacheShape
    context_length: int
    num_parameters: int
    num_layers: int
    attention_width: int  # query heads times their size, summed over the target's attention layers
    eos_token_ids: tuple[int, ...]
