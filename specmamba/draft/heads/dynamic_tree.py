"""Dynamic draft trees in the manner of EAGLE-2 (arXiv 2406.16858, section 4).

Every step expands its best nodes; at the end the best of all candidates are kept.

The value of a node is the probability of its path according to the draft head. It never rises from parent to child, so
the best N - 1 candidates form a tree, and this choice is optimal for a budget of N nodes.

When children are drawn for acceptance by rejection, whether a node is kept must not depend on the token that was drawn
for it; else the kept tokens would no longer be draws from the draft's distribution. In this case the value of a j-th
child uses the j-th largest probability in place of its token's own, and the true probabilities of the tokens above it.
This value bounds the values of all nodes below it, so none that depends on the drawn token can displace it.
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
    """The part of a drafter that runs its head, as growing a tree needs it."""

    head: DraftHead

    def descend(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, depth: int, ancestors: Tensor | None, first_entry: int
    ) -> Tensor:
        """Run the head over draft nodes of one depth; ``MTPDrafter.descend`` describes arguments and result."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The children that one step proposes for the tree, [B, C] each."""

    tokens: Tensor  # int64
    path_logp: Tensor  # log probability of the path down to the token
    value: Tensor  # log of the node's value, as the module's docstring defines it
    parent: Tensor  # int64, index over the candidates of all steps; 0 is the root


def grow_dynamic_tree(
    runner: HeadRunner, picker: ChildPicker, plan: DraftPlan, batch: Batch, hidden: Tensor
) -> DraftTree:
    """Draft a tree of ``plan.max_nodes`` nodes on every root.

    Args:
        runner: runs the head.
        picker: picks children.
        plan: gives depth, children per node and number of nodes.
        batch: the roots.
        hidden: [B, 1, H], the head's states after the roots.
    """
    size, k, device = batch.size, plan.topk, hidden.device
    children = picker.pick(runner.head.logits(hidden), k, batch, 0)
    nothing = torch.zeros(size, 1, device=device)
    steps = [_candidates(children, nothing, nothing, torch.zeros(size, 1, dtype=torch.int64, device=device))]
    expanded = [torch.zeros(size, 1, dtype=torch.int64, device=device)]  # candidates that have children
    probs = [children.probs]
    ancestors = torch.ones(size, 1, 1, dtype=torch.bool, device=device)  # mask of the entries; entry 0 is the root
    for depth in range(1, plan.num_steps):
        last, num_before = steps[-1], 1 + sum(step.tokens.shape[1] for step in steps[:-1])
        best = last.value.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        above = best // k  # index of the parent among the nodes of the step before
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
    """Make candidates of the children of F nodes; ``path_logp``, ``value`` and ``parent`` [B, F] are of these nodes."""
    bound = torch.minimum(path_logp, value)[..., None]
    return Candidates(
        tokens=children.tokens.flatten(1),
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


def _best_nodes(
    batch: Batch, plan: DraftPlan, steps: list[Candidates], expanded: Tensor, probs: list[Tensor]
) -> DraftTree:
    """Return the tree of the root and the N - 1 candidates of the highest value; impossible ones become padding."""
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
        entry = torch.zeros_like(tokens)  # nodes without children keep 0, their rows are not used
        entry.scatter_(1, expanded, torch.arange(expanded.shape[1], device=entry.device).expand_as(expanded))
        rows = torch.cat(probs, 1)
        draft_probs = rows.gather(1, entry.gather(1, kept)[..., None].expand(-1, -1, rows.shape[2]))
    return DraftTree(tokens.gather(1, kept), shape, draft_probs)
