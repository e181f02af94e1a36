"""The seam between drafting and the rest: ``Drafter``, and the drafter that proposes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from specmamba.core import Batch, Chunk, DraftTree, TreeShape, Verdict
from specmamba.kernels import tree as tree_ops


class Drafter(ABC):
    """Proposes trees. Whatever it proposes, the text stays the target's: a drafter can only cost time."""

    max_nodes: int  # nodes of a tree at the most, root included

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTree:
        """A tree for every row of the batch, on its root. KV slots behind the roots are free for the drafter to use."""

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

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor, accepted: Sequence[int]) -> None:  # noqa: B027
        """The target has decided; ``features`` [B, N, F] are what it says of the tree's nodes."""


class NoDrafter(Drafter):
    """Plain decoding: the tree is its root."""

    max_nodes = 1

    def propose(self, batch: Batch) -> DraftTree:
        """See ``Drafter``."""
        return DraftTree(batch.root_tokens[:, None], chain_shape(len(batch.rows), 1, batch.root_tokens.device))


@lru_cache(maxsize=1024)
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
