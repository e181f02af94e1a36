"""Trees over marginals: the best draft tree where the token at a depth is drafted without knowing those above it.

A block head gives one distribution for each depth. A node is then a list of ranks, one for each depth down to its own:
its tokens are the r-th likeliest ones there. Its value is the product of their probabilities, the probability of its
path if the tokens were independent. It never rises from a node to its child or to a higher rank, so the N - 1 nodes of
the highest value form a tree, the best one with N nodes: the one that DDTree (arXiv 2604.12989) finds with a heap.

A node with ranks r has at least those as ancestors or lower-ranked relatives whose ranks are nowhere above r:
sum over j of prod(r_i + 1, i <= j) nodes, itself included. Where these are more than N - 1 it is never among the best,
so that the nodes that may be are a fixed list, made once. A draft adds up log probabilities level by level over that
list, sorts, and takes the first N - 1: the same operations whatever the distributions are.

Where children are drawn (acceptance by rejection), all nodes of a depth share one draw of k children without
replacement, from the one distribution that they have. That is as good as a draw for each: a path passes one node of a
depth at the most, and which one does not depend on the tokens drawn below. Values are then those of places
(``Children``), which do not depend on any drawn token, so neither does the choice of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.draft.heads.children import Children


@dataclass(frozen=True, slots=True)
class MarginalTrees:
    """The nodes that the best trees may have, level by level, ranks ascending. Its tensors must not be changed."""

    max_nodes: int  # N, of a tree, the root included
    ranks: tuple[Tensor, ...]  # by depth: [C_d] int64, the rank of each node among its siblings
    above: tuple[Tensor, ...]  # by depth: [C_d] int64, its parent's place in the level above; 0 below the root
    parents: Tensor  # [C] int64: 0 for the root, 1 + c for node c
    depths: Tensor  # [C] int64, 1 for children of the root
    places: Tensor  # [C] int64, (depth - 1) * k + rank

    def best(self, batch: Batch, children: Children) -> DraftTree:
        """The best tree on every root; nodes that cannot be drawn become padding.

        Args:
            batch: the roots.
            children: of D nodes, one for each depth from the root's on, k of each.
        """
        value = self._values(children.place_logp)
        kept = value.sort(dim=-1, descending=True, stable=True).indices[:, : self.max_nodes - 1].sort(-1).values
        of_parent = self.parents[kept]
        parent_node = (kept[:, None] + 1 < of_parent[..., None]).sum(-1) + (of_parent > 0)
        exists = value.gather(1, kept) > -torch.inf
        root = torch.zeros_like(batch.root_tokens)[:, None]
        tokens = torch.cat([batch.root_tokens[:, None], children.tokens.flatten(1).gather(1, self.places[kept])], 1)
        parents = torch.cat([root - 1, parent_node.where(exists, -1)], 1)
        probs, num_steps, topk = children.probs, *children.tokens.shape[1:]
        if probs is not None:  # those at the last depth have no children, their rows are not used
            entries = torch.cat([root, self.depths[kept].clamp(max=num_steps - 1)], 1)
            probs = probs.gather(1, entries[..., None].expand(-1, -1, probs.shape[2]))
        return DraftTree(tokens, tree_shape(parents, topk), probs)

    def _values(self, place_logp: Tensor) -> Tensor:
        """Log probabilities [B, C] of the paths, from those of places [B, D, k]."""
        value, levels = torch.zeros_like(place_logp[:, 0, :1]), list[Tensor]()
        for depth, (ranks, above) in enumerate(zip(self.ranks, self.above, strict=True)):
            value = value[:, above] + place_logp[:, depth][:, ranks]
            levels.append(value)
        return torch.cat(levels, 1)


@cache
def marginal_trees(num_steps: int, topk: int, max_nodes: int, device: torch.device) -> MarginalTrees:
    """Make the list for trees of depth ``num_steps``, ``topk`` children of a node and N = ``max_nodes`` nodes."""
    levels: list[list[tuple[int, int, int, int]]] = [[(0, 0, 1, 0)]]  # rank, place of the parent, product, sum
    for _ in range(num_steps):
        level = []
        for place, (_, _, product, total) in enumerate(levels[-1]):
            for rank in range(topk):
                here = product * (rank + 1)
                if total + here > max_nodes - 1:
                    break
                level.append((rank, place, here, total + here))
        if not level:
            break
        levels.append(level)
    nodes = levels[1:]
    firsts = [0, 1]  # of each level, among the root and all nodes
    for level in nodes:
        firsts.append(firsts[-1] + len(level))

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return MarginalTrees(
        max_nodes=max_nodes,
        ranks=tuple(column([rank for rank, *_ in level]) for level in nodes),
        above=tuple(column([place for _, place, *_ in level]) for level in nodes),
        parents=column([firsts[depth] + place for depth, level in enumerate(nodes) for _, place, *_ in level]),
        depths=column([depth for depth, level in enumerate(nodes, 1) for _ in level]),
        places=column([(depth * topk) + rank for depth, level in enumerate(nodes) for rank, *_ in level]),
    )


def chain_of(batch: Batch, tokens: Tensor, probs: Tensor | None) -> DraftTree:
    """Chains of drafts ``tokens`` [B, D] on the roots, which were drawn from ``probs`` [B, D, V]; None: chosen."""
    if probs is not None:  # the last node has no children, its row is not used
        probs = torch.cat([probs, probs[:, -1:]], 1)
    tokens = torch.cat([batch.root_tokens[:, None], tokens], 1)
    return DraftTree(tokens, chain_shape(batch.size, tokens.shape[1], tokens.device), probs)
