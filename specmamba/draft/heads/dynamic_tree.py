"""Dynamic draft trees in the manner of EAGLE-2 (arXiv 2406.16858, section 4).

Expand the best nodes of every step, then keep the best of all that were seen.

A node's value is the probability of its path as the draft sees it, and never rises from parent to child; so the best
N - 1 nodes form a tree, and best first is optimal for a budget of nodes.

When children are drawn for acceptance by rejection, whether a node is kept must not depend on the token that was drawn
for it, or kept tokens would no longer be draws from the draft's distribution. There the value of a j-th child counts
the j-th largest probability in place of its own; what was drawn above it counts in full. A place's value bounds the
values of all below it, so nothing that depends on its token can push it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import tree_shape
from specmamba.draft.heads.children import ChildPicker, Children
from specmamba.models.base import DraftHead


class HeadRunner(Protocol):
    """What a growing tree asks of the drafter."""

    head: DraftHead

    def descend(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, depth: int, ancestors: Tensor | None, first_entry: int
    ) -> Tensor:
        """See ``MTPDrafter.descend``."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that were seen at one step, [B, C] each."""

    tokens: Tensor  # int64
    path_logp: Tensor  # of the path down to the token
    value: Tensor  # of the place; see above
    parent: Tensor  # int64, numbered over all candidates; 0 is the root


def grow_dynamic_tree(
    runner: HeadRunner, picker: ChildPicker, plan: DraftPlan, batch: Batch, hidden: Tensor
) -> DraftTree:
    """Draft a tree of ``plan.max_nodes`` nodes on every root.

    Args:
        runner: runs the head.
        picker: picks children.
        plan: depth, children per node, nodes.
        batch: the roots.
        hidden: [B, 1, H], the head's states after the roots.
    """
    size, k, device = batch.size, plan.topk, hidden.device
    children = picker.pick(runner.head.logits(hidden), k, batch, 0)
    nothing = torch.zeros(size, 1, device=device)
    steps = [_candidates(children, nothing, nothing, torch.zeros(size, 1, dtype=torch.int64, device=device))]
    expanded = [torch.zeros(size, 1, dtype=torch.int64, device=device)]  # candidates that have children
    probs = [children.probs]
    ancestors = torch.ones(size, 1, 1, dtype=torch.bool, device=device)  # of the entries so far; entry 0 is the root
    for depth in range(1, plan.num_steps):
        last, num_before = steps[-1], 1 + sum(step.tokens.shape[1] for step in steps[:-1])
        best = last.value.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        above = best // k  # the parent's place in the step before
        hidden = hidden.gather(1, above[..., None].expand(-1, -1, hidden.shape[2]))
        num_entries = ancestors.shape[2]
        parent_entry = num_entries - expanded[-1].shape[1] + above
        ancestors = _add_entries(ancestors, parent_entry)
        tokens = last.tokens.gather(1, best)
        hidden = runner.descend(batch, tokens, hidden, depth, ancestors[:, num_entries:], num_entries)
        children = picker.pick(runner.head.logits(hidden), k, batch, num_entries)
        steps.append(
            _candidates(children, last.path_logp.gather(1, best), last.value.gather(1, best), num_before + best)
        )
        expanded.append(num_before + best)
        probs.append(children.probs)
    return _best_nodes(batch, plan, steps, torch.cat(expanded, 1), [p for p in probs if p is not None])


def _candidates(children: Children, path_logp: Tensor, value: Tensor, parent: Tensor) -> Candidates:
    """Children of nodes with these values [B, F] each."""
    bound = torch.minimum(path_logp, value)[..., None]
    return Candidates(
        tokens=children.tokens.flatten(1),
        path_logp=(path_logp[..., None] + children.token_logp).flatten(1),
        value=(bound + children.place_logp).flatten(1),
        parent=parent[..., None].expand_as(children.tokens).flatten(1),
    )


def _add_entries(ancestors: Tensor, parent_entry: Tensor) -> Tensor:
    """The ancestor mask [B, E, E] of the entries so far, with new ones [B, F] under their parents behind them."""
    size, num_entries, _ = ancestors.shape
    num_new = parent_entry.shape[1]
    inherited = ancestors.gather(1, parent_entry[..., None].expand(-1, -1, num_entries))
    itself = torch.eye(num_new, dtype=torch.bool, device=ancestors.device).expand(size, -1, -1)
    old = torch.nn.functional.pad(ancestors, (0, num_new))
    return torch.cat([old, torch.cat([inherited, itself], 2)], 1)


def _best_nodes(
    batch: Batch, plan: DraftPlan, steps: list[Candidates], expanded: Tensor, probs: list[Tensor]
) -> DraftTree:
    """The root and the N - 1 candidates of the highest value; candidates of no value become padding."""
    root = torch.zeros_like(batch.root_positions)[:, None]
    tokens = torch.cat([batch.root_tokens[:, None], *(step.tokens for step in steps)], 1)
    parents = torch.cat([root - 1, *(step.parent for step in steps)], 1)
    value = torch.cat([root + torch.inf, *(step.value for step in steps)], 1)
    kept = value.sort(dim=-1, descending=True, stable=True).indices[:, : plan.max_nodes].sort(-1).values
    parent_node = torch.searchsorted(kept, parents.gather(1, kept))
    is_child = (value.gather(1, kept) > -torch.inf) & (kept > 0)
    shape = tree_shape(parent_node.where(is_child, -1), plan.topk)
    draft_probs = None
    if probs:
        entry = torch.zeros_like(tokens)  # of nodes without children: any will do
        entry.scatter_(1, expanded, torch.arange(expanded.shape[1], device=entry.device).expand_as(expanded))
        rows = torch.cat(probs, 1)
        draft_probs = rows.gather(1, entry.gather(1, kept)[..., None].expand(-1, -1, rows.shape[2]))
    return DraftTree(tokens.gather(1, kept), shape, draft_probs)
