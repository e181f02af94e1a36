"""Growing drafts from one pass of a block head, where a token says something about the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.core import Batch
from specmamba.models.base import TokenLinks


class LinkedBlock:
    """One block of every root, as growing a chain or a tree needs it: a ``HeadRunner`` that runs no head.

    What it passes on from node to node, the ``hidden`` of growing, are the states of paths and the latents of nodes,
    [B, F, S + R]; ``logits`` is meant for the nodes of the last ``descend``.
    """

    def __init__(self, links: TokenLinks, hidden: Tensor, marginals: Tensor) -> None:
        """Take the output of a pass.

        Args:
            links: between tokens.
            hidden: [B, D, H], of the block at every depth.
            marginals: [B, D, V], logits of the tokens at every depth.
        """
        self._links, self._hidden, self._marginals = links, hidden, marginals
        self._depth = 0

    @property
    def head(self) -> LinkedBlock:
        """Itself: it has the logits."""
        return self

    def start(self, batch: Batch) -> Tensor:
        """States and latents [B, 1, S + R] of the roots."""
        nothing = self._hidden.new_zeros(batch.size, 1, self._links.state_size)
        return self.descend(batch, batch.root_tokens[:, None], nothing, 0, None, 0)

    def descend(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, depth: int, ancestors: Tensor | None, first_entry: int
    ) -> Tensor:
        """Go down to nodes ``tokens`` [B, F] at a depth, from what was passed on at their parents [B, F, S + R]."""
        self._depth, size = depth, self._links.state_size
        of_block = self._hidden[:, depth : depth + 1]
        latent, state = self._links.latent(tokens, of_block, hidden[..., :size])
        return torch.cat([state, latent], -1) if size else latent

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, F, V] of the nodes' children."""
        marginal = self._marginals[:, self._depth : self._depth + 1]
        return self._links.logits(marginal, hidden[..., self._links.state_size :])


def num_expanded(topk: int, widths: Sequence[int]) -> int:
    """How many nodes get children in trees with these ``widths``, the root included."""
    total = expanded = 1
    for width in widths:
        expanded = min(width, expanded * topk)
        total += expanded
    return total
