"""What the engine asks of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from specmamba.cache.shapes import CacheShape
from specmamba.kernels.linear import WeightForm
from specmamba.layers.context import ForwardContext

DraftAlgorithm = Literal["mtp", "eagle", "eagle3"]
DraftKind = DraftAlgorithm | Literal["draft-model"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How the weights of a checkpoint are brought into memory."""

    dtype: torch.dtype  # of weights and activations
    device: torch.device  # "meta": nothing but shapes
    want_draft_head: bool = False  # load the checkpoint's own draft head too, where there is one
    form: WeightForm = "plain"  # of the target's matrices
    draft_form: WeightForm = "plain"  # of a draft's
    stands_for: str = "cpu"  # the kind of device on which a model that is nothing but shapes would be

    @property
    def place(self) -> torch.device:
        """The device that decides how weights are laid out."""
        return torch.device(self.stands_for) if self.device.type == "meta" else self.device


class TargetOutput(NamedTuple):
    """What a target says of tokens [B, L]."""

    hidden: Tensor  # [B, L, H], after the final norm
    features: Tensor  # [B, L, F], what a draft head starts from: the same, unless it reads other layers


class Target(Protocol):
    """The model that decides."""

    vocab_size: int
    hidden_size: int
    is_watched: bool  # somebody notes what is run: no step is replayed, for that would note nothing

    def forward(self, tokens: Tensor, context: ForwardContext) -> TargetOutput:
        """Run tokens [B, L] int64."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, L] int64 -> [B, L, H], what the first layer gets."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""

    def read_features(self, layers: tuple[int, ...]) -> None:
        """From now on ``features`` are the residual streams in front of these layers, side by side.

        Raises:
            UnsupportedModelError: the model has no such layer.
        """


class DraftHead(Protocol):
    """A head that guesses from the target's hidden states: MTP, EAGLE.

    Entry t takes the hidden state of position t-1 and the token at t, and guesses the token at t+1. Its keys and values
    live in the target's KV pool, at the token's own position, so a shared prefix shares them too.

    A head may have several modules, one for each depth of a draft, with KV layers of their own; see ``MTPDrafter``.
    """

    width: int  # H', of the hidden states that it takes and gives
    num_modules: int  # 1: the same one at every depth

    def combine(self, features: Tensor) -> Tensor:
        """The target's features [..., F] as this head takes them: [..., H']."""

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext, module: int = 0) -> Tensor:
        """Tokens [B, L] and hidden states [B, L, H'] of the positions before them -> the head's own [B, L, H'].

        The hidden states are the target's, combined, or the head's own: those of the module before, or of the last one.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's own [..., H'] -> [..., V] over the target's vocabulary; -inf for what it never drafts."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory."""

    architecture: str
    target: Target
    draft_head: DraftHead | None
    cache_shape: CacheShape
    context_length: int
    num_parameters: int
    weight_bytes: int
    num_layers: int
    attention_width: int  # query heads times their size, summed over the target's attention layers
    eos_token_ids: tuple[int, ...] = ()
    draft_algorithm: DraftAlgorithm = "mtp"  # what the draft head is, where there is one


@dataclass(frozen=True, slots=True)
class Models:
    """The target, and where a model of its own drafts for it, that too."""

    target: LoadedModel
    draft: LoadedModel | None
    looked_for_draft: bool  # False: nothing to draft with was asked for, whatever there may be

    @property
    def draft_kind(self) -> DraftKind | None:
        """What there is to draft with."""
        if self.draft is not None:
            return "draft-model"
        return None if self.target.draft_head is None else self.target.draft_algorithm

    @property
    def weight_bytes(self) -> int:
        return self.target.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)
