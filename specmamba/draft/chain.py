"""Drafting one token after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree
from specmamba.draft.base import chain_shape
from specmamba.draft.children import ChildPicker


def grow_chain(
    picker: ChildPicker,
    batch: Batch,
    num_nodes: int,
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
    descend: Callable[[Tensor, Tensor, int], Tensor],
) -> DraftTree:
    """Draft a chain of ``num_nodes`` nodes on every root.

    Args:
        picker: picks each node's only child.
        batch: the roots.
        num_nodes: the root counted.
        hidden: [B, 1, H], the draft's states after the roots.
        logits: [B, 1, H] -> [B, 1, V].
        descend: (nodes [B, 1], states at their parents [B, 1, H], their depth) -> states at the nodes.
    """
    token = batch.root_tokens[:, None]
    tokens, probs = [token], []
    for depth in range(num_nodes - 1):
        if depth:
            hidden = descend(token, hidden, depth)
        token, drawn_from = picker.pick_one(logits(hidden), batch, depth)
        tokens.append(token)
        if drawn_from is not None:
            probs.append(drawn_from)
    draft_probs = torch.cat([*probs, probs[-1]], 1) if probs else None  # the last node has no children: any will do
    shape = chain_shape(batch.size, num_nodes, token.device)
    return DraftTree(torch.cat(tokens, 1), shape, draft_probs)
