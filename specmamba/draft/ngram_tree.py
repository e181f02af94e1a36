"""Several continuations of a text merged into one draft tree."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.draft.ngram_match import NO_TOKEN

# Of a node's score per step below the root. Any factor below 1 keeps a child's score below its parent's; from 0.3 to
# 0.95 acceptance hardly depends on it.
DEPTH_DECAY = 0.5


def merge(continuations: Tensor, weights: Tensor, max_children: int, max_drafts: int) -> tuple[Tensor, Tensor]:
    """The trie of the continuations of each row, cut to its best nodes.

    A node is a prefix that one or more continuations share. Its score is the sum of their weights, times
    ``DEPTH_DECAY`` per step of depth. So a node's score is below its parent's, and the best nodes of all make a tree.
    Of equal scores the shallower node's goes first, then that of an earlier continuation.

    Args:
        continuations: [B, C, S] int64, C and S at least 1; NO_TOKEN from where one has ended.
        weights: [B, C] float64, at least 0; a continuation of weight 0 is none.
        max_children: no node gets more.
        max_drafts: no tree gets more nodes, the root not counted.

    Returns:
        tokens and parents, [B, D] int64 each, of nodes 1 to D, best first, with D as large as the largest tree needs.
        Rows with fewer nodes end in parents of -1.
    """
    tokens = continuations.transpose(1, 2).contiguous()
    num_steps, count = tokens.shape[1:]
    same = tokens[..., None] == tokens[:, :, None]  # [B, S, C, C]: the first s + 1 tokens are the same
    for step in range(1, num_steps):
        same[:, step] &= same[:, step - 1]
    decay = torch.tensor([DEPTH_DECAY**depth for depth in range(1, num_steps + 1)], dtype=torch.float64)
    support = (same.double() @ weights[:, None, :, None]).squeeze(-1)
    others = torch.arange(count)
    first = others.where(same, count).amin(-1)  # [B, S, C]: the continuation that stands for all with this prefix
    stands = (first == others) & (tokens != NO_TOKEN)
    score = (support * decay[:, None]).gather(2, first)  # one score per prefix, however its sums were rounded
    if max_children < min(count, max_drafts):
        score = score * _is_among_siblings(score, same, first, stands, max_children)
    return _best_nodes(tokens, score * stands, first, max_drafts)


def _is_among_siblings(score: Tensor, same: Tensor, first: Tensor, stands: Tensor, max_children: int) -> Tensor:
    """Whether a prefix and all shorter ones are among the ``max_children`` best of their siblings: [B, S, C]."""
    mine, other = score[..., None], score[:, :, None]
    is_earlier = torch.arange(first.shape[2]) < first[..., None]
    is_better = ((other > mine) | ((other == mine) & is_earlier)) & stands[:, :, None]
    is_better[:, 1:] &= same[:, :-1]  # only siblings count
    is_among = is_better.sum(-1) < max_children
    for step in range(1, is_among.shape[1]):
        is_among[:, step] &= is_among[:, step - 1]
    return is_among


def _best_nodes(tokens: Tensor, score: Tensor, first: Tensor, max_drafts: int) -> tuple[Tensor, Tensor]:
    """Tokens and parents of the prefixes [B, S, C] with the highest scores; a score of 0 is no node. See ``merge``."""
    num_rows, num_steps, count = tokens.shape
    best, prefix = score.view(num_rows, -1).sort(dim=1, descending=True, stable=True)
    num_drafts = min(max_drafts, int((best > 0).sum(1).amax()))
    is_node, prefix = best[:, :num_drafts] > 0, prefix[:, :num_drafts]
    nodes = torch.arange(1, num_drafts + 1).expand_as(prefix)
    node_of_prefix = prefix.new_zeros(num_rows, num_steps * count).scatter_(1, prefix, nodes)
    stand_in = (first + torch.arange(num_steps)[:, None] * count).view(num_rows, -1)
    shorter = stand_in.gather(1, (prefix - count).clamp(min=0))
    parents = node_of_prefix.gather(1, shorter).where(prefix >= count, 0)
    drafts = tokens.view(num_rows, -1).gather(1, prefix)
    return drafts.where(is_node, 0), parents.where(is_node, -1)
