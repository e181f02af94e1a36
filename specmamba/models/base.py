"""The interface between the engine and the models: targets, draft heads, and loaded checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specmamba.cache.shapes import CacheShape
from specmamba.checkpoints.quantized.stored_report import NOTHING_STORED, StoredReport
from specmamba.kernels.linear import WeightForm
from specmamba.layers.context import ForwardContext
from specmamba.parallel.ranks import ONE_RANK, Ranks

DraftAlgorithm = Literal["mtp", "eagle", "eagle3", "dflash"]
DraftKind = DraftAlgorithm | Literal["draft-model"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How the weights of a checkpoint are brought into memory."""

    dtype: torch.dtype  # of weights and activations
    device: torch.device  # "meta": shapes without values
    want_draft_head: bool = False  # load the checkpoint's own draft head too, if it has one
    form: WeightForm = "plain"  # how the target's matrices are stored
    draft_form: WeightForm = "plain"  # how a draft's matrices are stored
    keeps_codes: bool = False  # matrices that the checkpoint stores quantized stay in their codes
    draft_keeps_codes: bool = False  # the same for a draft
    layout_device_type: str = "cpu"  # where ``device`` is "meta": the type of device whose layout of weights is assumed
    ranks: Ranks = ONE_RANK  # that share the model; this process gets the part of its rank
    divides_experts: bool = False  # a rank has some of the experts, and not a part of each

    @property
    def layout_device(self) -> torch.device:
        """The device whose layout of weights is used, also where the weights are shapes without values."""
        return torch.device(self.layout_device_type) if self.device.type == "meta" else self.device


class TargetOutput(NamedTuple):
    """Output of a target for tokens [B, L]."""

    hidden: Tensor  # [B, L, H], after the final norm
    features: Tensor  # [B, L, F], input of a draft head: the same as ``hidden`` unless the head reads other layers


class Target(Protocol):
    """The model that decides which tokens are generated."""

    vocab_size: int
    hidden_size: int
    is_watched: bool  # a tool records what the layers compute: steps run without CUDA graphs, which cannot record

    def forward(self, tokens: Tensor, context: ForwardContext) -> TargetOutput:
        """Run tokens [B, L] int64."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [B, L] int64: the input [B, L, H] of the first layer."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head to hidden states [..., H]: [..., V]."""

    def read_features(self, layers: tuple[int, ...]) -> None:
        """Make ``features`` the concatenated residual streams in front of these layers, from the next forward on.

        Raises:
            UnsupportedModelError: the model has no such layer.
        """


class DraftHead(Protocol):
    """A head that drafts from the target's hidden states: MTP, EAGLE.

    Entry t takes the hidden state of position t-1 and the token at t, and predicts the token at t+1. Its keys and
    values are in the target's KV pool at the token's own position, so requests with a common prefix share them too.

    A head may have several modules, one for each depth of a draft, each with KV layers of its own; see ``MTPDrafter``.
    """

    width: int  # H', of the hidden states that are its input and output
    num_modules: int  # 1: the same module at every depth

    def combine(self, features: Tensor) -> Tensor:
        """Turn the target's features [..., F] into this head's input [..., H']."""

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext, module: int = 0) -> Tensor:
        """Run the head over tokens [B, L] int64.

        Args:
            tokens: [B, L] int64.
            hidden: [B, L, H'], of the positions before the tokens: the target's combined features, or the output of the
                module of the depth before.
            context: positions and KV of these tokens.
            module: the index of the module.

        Returns:
            [B, L, H'], the head's own hidden states.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head to [..., H']: [..., V] over the target's vocabulary, -inf for tokens never drafted."""


@dataclass(frozen=True, slots=True)
class KeyView:
    """Which keys the attention layers of a block see; several layers may have the same view."""

    window: int | None = None  # W: a token at position p sees no key before p - W + 1; None: all of the context
    is_causal: bool = False  # a token of the block sees those of the block before it alone, not those behind it


class TokenLinks(Protocol):
    """How the token of a node changes the distribution of its children, which a block alone does not know."""

    state_size: int  # S, numbers that a path carries from node to node; 0: a node's token alone counts
    latent_size: int  # R

    def latent(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Look at nodes of one depth.

        Args:
            tokens: [B, F] int64, of the nodes.
            hidden: [B, 1, H], of the block where their children are predicted.
            state: [B, F, S], carried by the paths down to their parents; zeros above the root.

        Returns:
            What ``logits`` needs of them [B, F, R], and the states [B, F, S] behind them.
        """

    def logits(self, marginal: Tensor, latent: Tensor) -> Tensor:
        """Logits [B, F, V] of the nodes' children, from those [B, 1, V] that the block has and ``latent`` [B, F, R]."""


@runtime_checkable
class BlockHead(Protocol):
    """A head that drafts a block of tokens in one pass, from the target's features: DFlash, DSpark, DFlash2.

    Its keys and values at a position that the target has run depend on the target's features there alone. They are in
    the target's KV pool at that position, so requests with a common prefix share them too.
    """

    variant: str  # in words
    width: int  # H, of context vectors and hidden states
    block_size: int  # of the largest draft, the root included
    drafts_at_root: bool  # a token is predicted where the one before it stands, the first at the root: no mask for it
    views: tuple[KeyView, ...]  # of its layers, each once
    links: TokenLinks | None  # None: the tokens of a block do not know each other
    # (tokens above drafts [B, D], hidden states there [B, D, H]) -> logits [B, D] of being accepted; None: unknown
    confidence: Callable[[Tensor, Tensor], Tensor] | None

    def combine(self, features: Tensor) -> Tensor:
        """Turn the target's features [..., F] into context vectors [..., H]."""

    def remember(self, vectors: Tensor, context: ForwardContext) -> None:
        """Store keys and values of context vectors [B, L, H] at the positions of ``context``."""

    def forward(self, roots: Tensor, contexts: Sequence[ForwardContext]) -> Tensor:
        """Run blocks on roots.

        Args:
            roots: [B] int64.
            contexts: for every one of ``views``, at the same positions [B, L]: of the roots, and of L - 1 masks.

        Returns:
            Hidden states [B, D, H] that predict the D tokens behind the roots: D = L where ``drafts_at_root``, else
            L - 1.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head to [..., H]: [..., V], for the tokens that these states predict."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory."""

    architecture: str
    target: Target
    draft_head: DraftHead | BlockHead | None
    cache_shape: CacheShape
    context_length: int
    num_parameters: int
    weight_bytes: int
    num_layers: int
    attention_width: int  # query heads times their size, summed over the target's attention layers
    eos_token_ids: tuple[int, ...] = ()
    draft_algorithm: DraftAlgorithm = "mtp"  # the kind of ``draft_head``
    stored: StoredReport = NOTHING_STORED  # of the checkpoint


@dataclass(frozen=True, slots=True)
class Models:
    """The target, and the separate draft model if there is one."""

    target: LoadedModel
    draft: LoadedModel | None
    looked_for_draft: bool  # False: the flags ask for no draft, so a draft that is there was not loaded

    @property
    def draft_kind(self) -> DraftKind | None:
        """The kind of draft that was loaded; None: there is none."""
        if self.draft is not None:
            return "draft-model"
        return None if self.target.draft_head is None else self.target.draft_algorithm

    @property
    def block_size(self) -> int | None:
        """Of the largest block that the draft head drafts, the root included; None: it drafts no blocks."""
        head = self.target.draft_head
        return head.block_size if isinstance(head, BlockHead) else None

    @property
    def weight_bytes(self) -> int:
        return self.target.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)
