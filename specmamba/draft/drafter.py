"""The seam between drafting and the rest: ``Drafter``, and the drafter that proposes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specmamba.core import Batch, Chunk, DraftTree, PendingTokens, TreeShape, Verdict
from specmamba.kernels import tree as tree_ops


@dataclass(frozen=True, slots=True)
class HostPendingTokens:
    """What the host knows of the ``PendingTokens`` of a batch's rows."""

    counts: tuple[int, ...]
    is_deferred: bool

    def on(self, device: torch.device) -> PendingTokens:
        """As a batch has them."""
        is_ragged = min(self.counts) < max(self.counts)
        counts = torch.tensor(self.counts, device=device) if is_ragged else None
        return PendingTokens(max(self.counts), counts, self.is_deferred)


class Drafter(ABC):
    """Proposes trees. Whatever it proposes, the text stays the target's: a drafter can only cost time.

    A step is ``prepare`` on the host, ``propose`` and ``observe`` on the device, and ``advance`` on the host again.
    """

    max_nodes: int  # nodes of a tree at the most, root included
    is_capturable = False  # ``propose`` and ``observe`` never look at the device or at rows, and can be replayed
    has_pending_tokens = False  # ``prepare`` gives some

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTree:
        """A tree for every row of the batch, on its root. KV slots behind the roots are free for the drafter to use."""

    def num_nodes(self, batch_size: int) -> int:
        """Nodes of the trees that batches of this size get, at the most."""
        return self.max_nodes

    def propose_nothing(self, batch: Batch) -> DraftTree:
        """The roots alone, for a batch that wants no drafts; a drafter that must keep up does so here."""
        self.propose(batch)
        return root_tree(batch)

    def prepare(self, rows: Sequence[int], batch_size: int, drafts: bool = True) -> HostPendingTokens | None:
        """A step of these rows begins, padded to ``batch_size``; without ``drafts``, ``propose_nothing`` follows.

        None: what is drafted follows from the batch alone.
        """
        return None

    def begin(self, row: int, tokens: Sequence[int]) -> None:  # noqa: B027 - a drafter without state does nothing
        """A request starts (or starts over) in this row; ``tokens`` are all that is known of it, root included."""

    def resume(self, row: int, features: Tensor, position: int) -> None:  # noqa: B027
        """The first ``position`` tokens of a request that has begun are cached; ``features`` [F] were taken there."""

    def features(self, row: int, position: int) -> Tensor | None:
        """What ``resume`` needs to go on behind the first ``position`` tokens of a row; [F].

        Every position on the path of the newest step, or the end of the newest chunk, can be asked for. None: nothing
        is needed.
        """
        return None

    def finish(self, batch: Batch) -> None:  # noqa: B027
        """These rows are about to end, and others will go on from what they have run.

        ``root_positions`` are where the newest steps' paths end; tokens and sampling settings of the roots mean
        nothing. ``features`` gives the same before and after.
        """

    def extend(self, chunk: Chunk, features: Tensor) -> None:  # noqa: B027
        """The target has run these known tokens; ``features`` [B, L, F] are what it says of them."""

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:  # noqa: B027
        """The target has decided; ``features`` [B, N, F] are what it says of the tree's nodes."""

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """The step is over; ``decided`` are the tokens behind each root: accepted drafts and the target's own."""


class NoDrafter(Drafter):
    """Plain decoding: the tree is its root."""

    max_nodes = 1
    is_capturable = True

    def propose(self, batch: Batch) -> DraftTree:
        """See ``Drafter``."""
        return root_tree(batch)


def root_tree(batch: Batch) -> DraftTree:
    """Trees that are their roots."""
    return DraftTree(batch.root_tokens[:, None], chain_shape(batch.size, 1, batch.root_tokens.device))


@cache
def chain_shape(batch_size: int, num_nodes: int, device: torch.device) -> TreeShape:
    """The shape of a batch of chains; always the same, so made once."""
    nodes = torch.arange(num_nodes, device=device)
    ancestors = nodes <= nodes[:, None]
    return TreeShape(
        parents=(nodes - 1).expand(batch_size, -1),
        ancestors=ancestors.expand(batch_size, -1, -1),
        depth=nodes.expand(batch_size, -1),
        is_chain=True,
        max_children=1,
    )


def tree_shape(parents: Tensor, max_children: int) -> TreeShape:
    """The shape of any batch of trees.

    Args:
        parents: [B, N] int64, topological order; -1 for the root and for padding.
        max_children: no node has more.
    """
    ancestors = tree_ops.ancestors(parents)
    return TreeShape(parents, ancestors, tree_ops.depth(ancestors), is_chain=False, max_children=max_children)
