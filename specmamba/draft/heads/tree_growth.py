"""Growing draft trees with a head: dynamic trees as in EAGLE-2 (arXiv 2406.16858, section 4), and static trees.

Every step expands its best nodes; at the end the best of all candidates are kept.

The value of a node is the probability of its path according to the draft head. It never rises from parent to child, so
the best N - 1 candidates form a tree, and this choice is optimal for a budget of N nodes.

When children are drawn for acceptance by rejection, whether a node is kept must not depend on the token that was drawn
for it; else the kept tokens would no longer be draws from the draft's distribution. In this case the value of a j-th
child uses the j-th largest probability in place of its token's own, and the true probabilities of the tokens above it.
This value bounds the values of all nodes below it, so none that depends on the drawn token can displace it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, TreeShape
from specmamba.draft.candidates import Candidates
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.draft.heads.children import ChildPicker, Children
from specmamba.kernels import sampling as sampling_ops
from specmamba.kernels.draft_sizing import Ints
from specmamba.trees import StaticTree


class HasLogits(Protocol):
    """A draft head or a draft model, as growing a tree needs it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, F, H] -> [B, F, V]."""


class HeadRunner(Protocol):
    """The part of a drafter that runs its head, as growing a tree needs it."""

    @property
    def head(self) -> HasLogits:
        """Gives the logits after nodes."""

    def descend(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, depth: int, ancestors: Tensor | None, first_entry: int
    ) -> Tensor:
        """Run the head over draft nodes of one depth; ``MTPDrafter.descend`` describes arguments and result."""


@dataclass(frozen=True, slots=True)
class Offers:
    """The children that one step proposes for the tree, [B, C] each."""

    tokens: Tensor  # int64
    place_logp: Tensor  # log probability of the child, given its parent: of its place, if it was drawn
    path_logp: Tensor  # log probability of the path down to the token
    value: Tensor  # log of the node's value, as the module's docstring defines it
    parent: Tensor  # int64, index over the offers of all steps; 0 is the root


@dataclass(frozen=True, slots=True)
class Growth:
    """What a head proposes in all steps of a draft."""

    steps: list[Offers]
    topk: int  # children of every node that has some
    expanded: Tensor  # [B, E] int64, the offers that have children, and first the root
    probs: list[Tensor]  # [B, F, V] of each step, what children were drawn from; empty: the likeliest tokens


def grow_dynamic_tree(
    runner: HeadRunner,
    picker: ChildPicker,
    plan: DraftPlan,
    batch: Batch,
    hidden: Tensor,
    width: int | Sequence[int] | None = None,
) -> DraftTree:
    """Draft a tree of ``plan.max_nodes`` nodes on every root.

    Args:
        runner: runs the head.
        picker: picks children.
        plan: gives depth, children per node and number of nodes.
        batch: the roots.
        hidden: [B, 1, H], the head's states after the roots.
        width: nodes of a step that get children, as of ``grow``; None: as many as a node gets.
    """
    growth = grow(runner, picker, batch, hidden, (plan.num_steps, plan.topk, plan.topk if width is None else width))
    return _best_nodes(batch, plan, growth)


def exact_widths(num_steps: int, max_nodes: int) -> tuple[int, ...]:
    """Nodes of each depth that must get children for ``grow_dynamic_tree`` to find the best tree, from depth 1 on.

    A node at depth d with a child in the tree has d - 1 nodes between it and the root, and every node of its depth with
    a higher value is in the tree too: so no more than N - 2 - d of these, itself excluded.
    """
    return tuple(max(1, max_nodes - 1 - depth) for depth in range(1, num_steps))


def grow(
    runner: HeadRunner,
    picker: ChildPicker,
    batch: Batch,
    hidden: Tensor,
    shape: tuple[int, int, int | Sequence[int]],
) -> Growth:
    """Propose children, step by step.

    Args:
        runner: runs the head.
        picker: picks children.
        batch: the roots.
        hidden: [B, 1, H], the head's states after the roots.
        shape: steps, children of a node, and nodes of a step that get children: the best by value; a number, or one for
            every step but the first.
    """
    num_steps, topk, width = shape
    widths = [width] * num_steps if isinstance(width, int) else width
    size, device = batch.size, hidden.device
    children = picker.pick(runner.head.logits(hidden), topk, batch, 0)
    nothing = torch.zeros(size, 1, device=device)
    root = torch.zeros(size, 1, dtype=torch.int64, device=device)
    steps, expanded, probs = [_offers(children, nothing, nothing, root)], [root], [children.probs]
    ancestors = torch.ones(size, 1, 1, dtype=torch.bool, device=device)  # mask of the entries; entry 0 is the root
    for depth in range(1, num_steps):
        last, num_before = steps[-1], 1 + sum(step.tokens.shape[1] for step in steps[:-1])
        best = last.value.sort(dim=-1, descending=True, stable=True).indices[:, : widths[depth - 1]].sort(-1).values
        above = best // topk  # index of the parent among the nodes of the step before
        hidden = hidden.gather(1, above[..., None].expand(-1, -1, hidden.shape[2]))
        num_entries = ancestors.shape[2]
        ancestors = _add_entries(ancestors, num_entries - expanded[-1].shape[1] + above)
        tokens = last.tokens.gather(1, best)
        hidden = runner.descend(batch, tokens, hidden, depth, ancestors[:, num_entries:], num_entries)
        children = picker.pick(runner.head.logits(hidden), topk, batch, num_entries)
        steps.append(_offers(children, last.path_logp.gather(1, best), last.value.gather(1, best), num_before + best))
        expanded.append(num_before + best)
        probs.append(children.probs)
    return Growth(steps, topk, torch.cat(expanded, 1), [p for p in probs if p is not None])


def offer_comb(
    runner: HeadRunner, picker: ChildPicker, batch: Batch, hidden: Tensor, num_steps: int, topk: int
) -> Candidates:
    """Offer ``topk`` children of the root, of its first child, of that one's first child, and so on.

    Args:
        runner: runs the head.
        picker: picks children.
        batch: the roots.
        hidden: [B, 1, H], the head's states after the roots.
        num_steps: depth of the deepest children.
        topk: children of a node.
    """
    levels: list[Children] = []
    for depth in range(num_steps):
        if depth:
            hidden = runner.descend(batch, levels[-1].tokens[:, 0, :1], hidden, depth, None, depth)
        levels.append(picker.pick(runner.head.logits(hidden), topk, batch, depth))
    tokens, place_logp = (torch.cat([getattr(level, name) for level in levels], 1) for name in ("tokens", "place_logp"))
    probs = [level.probs for level in levels if level.probs is not None]
    return comb_of(tokens, place_logp, torch.cat(probs, 1) if probs else None)


def comb_of(tokens: Tensor, place_logp: Tensor, probs: Tensor | None) -> Candidates:
    """Candidates of a chain's nodes and their siblings.

    Args:
        tokens: [B, D, k] int64, the children of the root, of its first child, and so on.
        place_logp: [B, D, k], as in ``Children``.
        probs: [B, D, V], what they were drawn from; None: chosen.
    """
    size, num_steps, topk = tokens.shape
    parents, entries, depths, ranks = _comb(num_steps, topk, tokens.device)
    parents, logp = parents.expand(size, -1), place_logp.flatten(1)
    if probs is None:
        return Candidates(tokens.flatten(1), parents, logp, depths, ranks)
    return Candidates(tokens.flatten(1), parents, logp, depths, ranks, probs, entries.expand(size, -1))


@cache
def _comb(num_steps: int, topk: int, device: torch.device) -> tuple[Tensor, Tensor, Ints, Ints]:
    """Parents [1, C] and entries [1, 1 + C] of ``Candidates``, depths and ranks; they must not be changed."""
    depths, ranks = np.repeat(np.arange(1, num_steps + 1), topk), np.tile(np.arange(topk), num_steps)
    parents = np.where(depths == 1, 0, (depths - 2) * topk + 1)
    entries = np.concatenate([[0], np.where((ranks == 0) & (depths < num_steps), depths, 0)])
    return torch.from_numpy(parents[None]).to(device), torch.from_numpy(entries[None]).to(device), depths, ranks


def candidates_of(growth: Growth) -> Candidates:
    """Return everything that a head proposed, for trees of any size."""
    tokens, logp, parents = (
        torch.cat([getattr(step, name) for step in growth.steps], 1) for name in ("tokens", "place_logp", "parent")
    )
    sizes = [step.tokens.shape[1] for step in growth.steps]
    depths = [depth for depth, size in enumerate(sizes, 1) for _ in range(size)]
    ranks = [i % growth.topk for size in sizes for i in range(size)]
    draft_probs = entries = None
    if growth.probs:
        draft_probs, num_entries = torch.cat(growth.probs, 1), growth.expanded.shape[1]
        entries = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int64, device=tokens.device)
        entries.scatter_(1, growth.expanded, torch.arange(num_entries, device=tokens.device).expand_as(growth.expanded))
    return Candidates(tokens, parents, logp, np.array(depths), np.array(ranks), draft_probs, entries)


def _offers(children: Children, path_logp: Tensor, value: Tensor, parent: Tensor) -> Offers:
    """Make offers of the children of F nodes; ``path_logp``, ``value`` and ``parent`` [B, F] are of these nodes."""
    bound = torch.minimum(path_logp, value)[..., None]
    return Offers(
        tokens=children.tokens.flatten(1),
        place_logp=children.place_logp.flatten(1),
        path_logp=(path_logp[..., None] + children.token_logp).flatten(1),
        value=(bound + children.place_logp).flatten(1),
        parent=parent[..., None].expand_as(children.tokens).flatten(1),
    )


def _add_entries(ancestors: Tensor, parent_entry: Tensor) -> Tensor:
    """Extend the ancestor mask [B, E, E] by F entries with the parents ``parent_entry`` [B, F]."""
    size, num_entries, _ = ancestors.shape
    num_tokens = parent_entry.shape[1]
    inherited = ancestors.gather(1, parent_entry[..., None].expand(-1, -1, num_entries))
    itself = torch.eye(num_tokens, dtype=torch.bool, device=ancestors.device).expand(size, -1, -1)
    old = torch.nn.functional.pad(ancestors, (0, num_tokens))
    return torch.cat([old, torch.cat([inherited, itself], 2)], 1)


def _best_nodes(batch: Batch, plan: DraftPlan, growth: Growth) -> DraftTree:
    """Return the tree of the root and the N - 1 offers of the highest value; impossible ones become padding."""
    steps, expanded = growth.steps, growth.expanded
    root = torch.zeros_like(batch.root_positions)[:, None]
    tokens = torch.cat([batch.root_tokens[:, None], *(step.tokens for step in steps)], 1)
    parents = torch.cat([root - 1, *(step.parent for step in steps)], 1)
    value = torch.cat([root + torch.inf, *(step.value for step in steps)], 1)
    kept = value.sort(dim=-1, descending=True, stable=True).indices[:, : plan.max_nodes].sort(-1).values
    parent_node = (kept[:, None] < parents.gather(1, kept)[..., None]).sum(-1)
    is_child = (value.gather(1, kept) > -torch.inf) & (kept > 0)
    shape = tree_shape(parent_node.where(is_child, -1), plan.topk)
    draft_probs = None
    if growth.probs:
        entry = torch.zeros_like(tokens)  # nodes without children keep 0, their rows are not used
        entry.scatter_(1, expanded, torch.arange(expanded.shape[1], device=entry.device).expand_as(expanded))
        rows = torch.cat(growth.probs, 1)
        draft_probs = rows.gather(1, entry.gather(1, kept)[..., None].expand(-1, -1, rows.shape[2]))
    return DraftTree(tokens.gather(1, kept), shape, draft_probs)


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
        ancestors = self.one.ancestors.expand(batch_size, -1, -1)
        return replace(
            self.one,
            parents=self.one.parents.expand(batch_size, -1),
            # once here: kernels for GPUs read dense ones, or each recurrent layer would copy them
            ancestors=ancestors.contiguous() if ancestors.is_cuda else ancestors,
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
            tokens[:, level.children] = sampling_ops.likeliest(logits, level.num_choices)[0][
                :, level.child_of, level.choice
            ]
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
