"""The step of several ranks: all of them have the draft trees and the verdict of rank 0.

What the ranks compute is the same to the last bit where their exchanges are. The step does not depend on that: tokens,
shapes and acceptance are decided once. Otherwise a difference in a near tie, or a mask that came late on one rank,
would give them different lengths, and the next exchange would mix rows of different requests or wait forever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, Packing, TreeShape, Verdict
from specmamba.kernels import tree as tree_ops
from specmamba.parallel.ranks import Ranks
from specmamba.verify.state_buffers import VerifySlots
from specmamba.verify.step import Drafts, GivenDrafts, Scored, Verifier


@dataclass(frozen=True)
class SameDrafts:
    """A drafter whose trees are those of rank 0."""

    drafts: Drafts
    ranks: Ranks

    def propose(self, batch: Batch) -> DraftTree:
        """Draft on every rank, and take the trees of rank 0."""
        tree, ranks = self.drafts.propose(batch), self.ranks
        shape, device = tree.shape, tree.tokens.device
        num_packed = 0 if shape.packing is None else shape.packing.num_packed
        sizes = torch.tensor([shape.num_nodes, shape.is_chain, shape.max_children, num_packed], device=device)
        num_nodes, is_chain, max_children, num_packed = ranks.broadcast(sizes).tolist()
        if ranks.is_first:
            ranks.broadcast(torch.stack([tree.tokens, shape.parents]))
            if shape.packing is not None:
                ranks.broadcast(torch.cat(_columns(shape.packing)))
            return tree
        given = torch.empty((2, batch.size, num_nodes), dtype=torch.int64, device=device)
        tokens, parents = ranks.broadcast(given).unbind()
        own = _shape(parents.contiguous(), bool(is_chain), max_children)
        if num_packed:
            lengths = [num_packed, batch.size * num_nodes, batch.size, batch.size]
            columns = torch.empty(sum(lengths), dtype=torch.int64, device=device)
            own = replace(own, packing=Packing(*ranks.broadcast(columns).split(lengths)))
        return DraftTree(tokens.contiguous(), own)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter."""
        self.drafts.observe(batch, verdict, features)


@dataclass(frozen=True)
class SameDraftsInStep:
    """``SameDrafts`` in a captured step, which has the same sizes on all ranks."""

    drafts: Drafts
    ranks: Ranks

    def propose(self, batch: Batch) -> DraftTree:
        """Draft on every rank, and take the tokens of rank 0, and the parents where they are not always the same."""
        tree, ranks = self.drafts.propose(batch), self.ranks
        shape = tree.shape
        if shape.num_nodes == 1:
            return tree
        given = torch.stack([tree.tokens] if shape.is_chain else [tree.tokens, shape.parents])
        ranks.broadcast(given)
        if ranks.is_first:
            return tree
        if not shape.is_chain:
            shape = replace(_shape(given[1], False, shape.max_children), packing=shape.packing)
        return replace(tree, tokens=given[0], shape=shape)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter."""
        self.drafts.observe(batch, verdict, features)


def _columns(packing: Packing) -> tuple[Tensor, ...]:
    return packing.places, packing.nodes, packing.firsts, packing.counts


def _shape(parents: Tensor, is_chain: bool, max_children: int) -> TreeShape:
    ancestors = tree_ops.ancestors(parents)
    return TreeShape(parents, ancestors, tree_ops.depth(ancestors), is_chain, max_children)


@dataclass(frozen=True)
class RankVerifier(Verifier):
    """A verifier of a model that several ranks share."""

    ranks: Ranks

    def score(self, batch: Batch, drafts: Drafts, slots: VerifySlots | None = None) -> Scored:
        """As ``Verifier.score``, with the trees of rank 0; those that a captured step is given are so already."""
        if slots is None:
            return super().score(batch, self.same(drafts), slots)
        is_same = isinstance(drafts, GivenDrafts)
        return super().score(batch, drafts if is_same else SameDraftsInStep(drafts, self.ranks), slots)

    def same(self, drafts: Drafts) -> Drafts:
        """As ``Verifier.same``."""
        return SameDrafts(drafts, self.ranks)

    def accept(self, batch: Batch, scored: Scored) -> Verdict:
        """As ``Verifier.accept``, decided by rank 0: the others need no sampling settings, grammars or logits."""
        size, num_nodes = scored.tree.tokens.shape
        columns = [num_nodes, 1, num_nodes + 1, 1, 1]
        if self.ranks.is_first:
            v = super().accept(batch, scored)
            parts = v.path, v.num_accepted[:, None], v.path_tokens, v.bonus[:, None], v.is_finite[:, None].long()
            self.ranks.broadcast(torch.cat(parts, 1))
            return v
        given = torch.empty((size, sum(columns)), dtype=torch.int64, device=scored.tree.tokens.device)
        path, num_accepted, tokens, bonus, is_finite = self.ranks.broadcast(given).split(columns, 1)
        one = (x[:, 0].contiguous() for x in (num_accepted, bonus, is_finite))
        count, last, finite = one
        return Verdict(path.contiguous(), count, tokens.contiguous(), last, finite > 0)
