"""Static draft trees: every request gets the same topology, whose nodes are given by depth and rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, TreeShape
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.draft.heads.children import ChildPicker, Children
from specmamba.draft.heads.dynamic_tree import HeadRunner
from specmamba.trees import StaticTree


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth that have children, and those children."""

    num_entries_before: int  # entries of earlier levels; entries are the root (entry 0) and all nodes with children
    nodes: Tensor  # [F] int64, nodes with children
    hidden_of: Tensor  # [F] int64, index of each node's parent in the level above
    ancestors: Tensor | None  # [F, entries] bool; None for the root and in chains
    children: Tensor  # [C] int64, nodes
    child_of: Tensor  # [C] int64, index of each child's parent in ``nodes``
    choice: Tensor  # [C] int64, which choice of its parent each child is: its rank, or its number if children are drawn
    num_choices: int  # choices that are needed of every parent


@dataclass(frozen=True, slots=True)
class StaticLayout:
    """A static tree, divided into the steps that draft it. Its tensors are made once and used by every draft."""

    one: TreeShape  # shape of a batch of one
    levels: tuple[Level, ...]
    entry: Tensor  # [N] int64, the entry of each node with children; 0 for the others

    @classmethod
    def of(cls, tree: StaticTree, draws: bool, device: torch.device) -> StaticLayout:
        """Prepare the tables of a topology.

        Args:
            tree: the topology.
            draws: children are drawn. Then the j-th of a node's children is the j-th draw, whatever its rank: leaving
                out an earlier draw would change the distribution of the later ones.
            device: device of the tensors.
        """
        by_rank = sorted(range(1, tree.num_nodes), key=lambda node: (tree.parents[node], tree.ranks[node]))
        siblings: dict[int, list[int]] = {}
        for node in by_rank:
            siblings.setdefault(tree.parents[node], []).append(node)
        if draws:
            choice = {node: i for nodes in siblings.values() for i, node in enumerate(sorted(nodes))}
        else:
            choice = dict(enumerate(tree.ranks))
        is_chain = tree.parents == tuple(range(-1, tree.num_nodes - 1))
        levels, entry = _levels(tree, siblings, choice, is_chain, device)
        return cls(
            one=_shape_of_one(tree, max(map(len, siblings.values())), is_chain, device),
            levels=levels,
            entry=torch.tensor(entry, device=device),
        )

    def shape(self, batch_size: int) -> TreeShape:
        """Return the shape of a batch of these trees."""
        return replace(
            self.one,
            parents=self.one.parents.expand(batch_size, -1),
            ancestors=self.one.ancestors.expand(batch_size, -1, -1),
            depth=self.one.depth.expand(batch_size, -1),
        )


def _shape_of_one(tree: StaticTree, max_children: int, is_chain: bool, device: torch.device) -> TreeShape:
    if is_chain:
        return chain_shape(1, tree.num_nodes, device)
    return tree_shape(torch.tensor([tree.parents], device=device), max_children)


def _levels(
    tree: StaticTree, siblings: dict[int, list[int]], choice: dict[int, int], is_chain: bool, device: torch.device
) -> tuple[tuple[Level, ...], list[int]]:
    """Return the steps of a draft, and the entry of each node."""
    depths = tree.depths
    entry, levels = [0] * tree.num_nodes, []
    seen: list[set[int]] = []  # ancestors of each entry, itself included
    above: list[int] = []
    for depth in range(max(depths)):
        nodes = [node for node in siblings if depths[node] == depth]
        nodes.sort()
        first = len(seen)
        for node in nodes:
            entry[node] = len(seen)
            seen.append({entry[node]} | (seen[entry[tree.parents[node]]] if node else set()))
        mask = torch.tensor([[e in sees for e in range(len(seen))] for sees in seen[first:]], device=device)
        children = [child for node in nodes for child in siblings[node]]
        levels.append(
            Level(
                num_entries_before=first,
                nodes=torch.tensor(nodes, device=device),
                hidden_of=torch.tensor([above.index(tree.parents[node]) for node in nodes if node], device=device),
                ancestors=None if depth == 0 or is_chain else mask,
                children=torch.tensor(children, device=device),
                child_of=torch.tensor([nodes.index(tree.parents[child]) for child in children], device=device),
                choice=torch.tensor([choice[child] for child in children], device=device),
                num_choices=max(choice[child] for child in children) + 1,
            )
        )
        above = nodes
    return tuple(levels), entry


def grow_static_tree(
    runner: HeadRunner, picker: ChildPicker, layout: StaticLayout, batch: Batch, hidden: Tensor
) -> DraftTree:
    """Draft tokens for a static tree on every root; ``hidden`` [B, 1, H] are the head's states after the roots."""
    size = batch.size
    tokens = batch.root_tokens[:, None].repeat(1, layout.one.num_nodes)
    is_drawn = torch.ones_like(tokens, dtype=torch.bool) if picker.draws_for(batch) else None
    probs = []
    for depth, level in enumerate(layout.levels):
        if depth:
            mask = None if level.ancestors is None else level.ancestors.expand(size, -1, -1)
            above = hidden[:, level.hidden_of]
            hidden = runner.descend(batch, tokens[:, level.nodes], above, depth, mask, level.num_entries_before)
        logits = runner.head.logits(hidden)
        if is_drawn is None:
            tokens[:, level.children] = logits.topk(level.num_choices, -1).indices[:, level.child_of, level.choice]
            continue
        picked = picker.pick(logits, level.num_choices, batch, level.num_entries_before)
        assert picked.probs is not None
        tokens[:, level.children] = picked.tokens[:, level.child_of, level.choice]
        probs.append(picked.probs)
        is_drawn[:, level.children] = _is_drawn(picked, level, is_drawn[:, level.nodes])
    if is_drawn is None:
        return DraftTree(tokens, layout.shape(size))
    draft_probs = torch.cat(probs, 1)[:, layout.entry]
    if layout.one.is_chain:  # one token is drawn from every distribution, so all children exist
        return DraftTree(tokens, layout.shape(size), draft_probs)
    parents = layout.one.parents.where(is_drawn, -1)
    return DraftTree(tokens, tree_shape(parents, layout.one.max_children), draft_probs)


def _is_drawn(picked: Children, level: Level, parent_is_drawn: Tensor) -> Tensor:
    """Return which children [B, C] exist: a distribution may have fewer possible tokens than the node has children."""
    exists = (picked.place_logp > -torch.inf) & parent_is_drawn[..., None]
    return exists[:, level.child_of, level.choice]
