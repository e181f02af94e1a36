"""The children of draft nodes (the likeliest tokens, or drawn ones), and chains of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree
from specmamba.draft.drafter import chain_shape
from specmamba.kernels import sampling as sampling_ops

OVERFLOW = 1e4  # in place of what is not finite


@dataclass(frozen=True, slots=True)
class Children:
    """The k children of F nodes, in the order in which they are tried."""

    tokens: Tensor  # [B, F, k] int64
    token_logp: Tensor  # [B, F, k], of the tokens
    place_logp: Tensor  # [B, F, k], falling: what a j-th child is worth, told without looking at its token
    probs: Tensor | None  # [B, F, V], what the tokens were drawn from; None: they are the likeliest


@dataclass(frozen=True, slots=True)
class ChildPicker:
    """Picks children from the logits of a draft head.

    When drafts are drawn, the distribution is what the request's own temperature and filters make of the head's logits,
    so that it is as near to the target's as the head allows. Greedy rows take the likeliest either way.
    """

    draws: bool

    def draws_for(self, batch: Batch) -> bool:
        """Whether children are drawn for this batch; there is nothing to draw where all rows are greedy."""
        return self.draws and batch.sampling.temperature is not None

    def pick(self, logits: Tensor, k: int, batch: Batch, first_entry: int) -> Children:
        """Choose k children for every node.

        Args:
            logits: [B, F, V], the head's after each node.
            k: children per node.
            batch: how the rows sample, and where their roots stand.
            first_entry: number of the first node among all nodes of this draft that get children; it makes the random
                numbers of different nodes different.
        """
        if self.draws_for(batch):
            return _draw(logits, k, batch, first_entry)
        logits = _finite(logits)
        top = logits.topk(k, -1)
        logp = top.values - logits.logsumexp(-1, keepdim=True)
        return Children(top.indices, logp, logp, None)

    def pick_one(self, logits: Tensor, batch: Batch, entry: int) -> tuple[Tensor, Tensor | None]:
        """The only children [B, 1] of a batch of lone nodes, from logits [B, 1, V], and what they were drawn from."""
        if self.draws_for(batch):
            children = _draw(logits, 1, batch, entry)
            return children.tokens[..., 0], children.probs
        return sampling_ops.argmax(logits), None


def _draw(logits: Tensor, k: int, batch: Batch, first_entry: int) -> Children:
    sampling, temperature = batch.sampling, batch.sampling.temperature
    assert temperature is not None
    greedy = temperature == 0
    is_greedy = greedy[:, None, None]
    # of greedy rows the second choices count too: they are told apart at temperature 1, and no filter takes them away
    spread = temperature.where(~greedy, 1)
    top_k, top_p, min_p = (
        None if x is None else x.where(~greedy, neutral)
        for x, neutral in ((sampling.top_k, 0), (sampling.top_p, 1), (sampling.min_p, 0))
    )
    probs = sampling_ops.probabilities(_finite(logits), spread, top_k, top_p, min_p)
    entries = torch.arange(first_entry, first_entry + logits.shape[1], device=logits.device)
    counters = (
        (batch.root_positions[:, None, None] << 20) | (entries[:, None] << 8) | torch.arange(k, device=logits.device)
    )
    uniforms = sampling_ops.uniform(sampling.seeds, counters.flatten(1), sampling_ops.DRAFT_STREAM).view_as(counters)
    drawn, is_drawn = sampling_ops.draw_children(probs, uniforms)
    likeliest = probs.topk(k, -1)
    tokens = torch.where(is_greedy, likeliest.indices, drawn)
    place_logp = likeliest.values.log().masked_fill(~(is_drawn | is_greedy), -torch.inf)
    return Children(tokens, probs.gather(-1, tokens).log(), place_logp, probs)


def _finite(logits: Tensor) -> Tensor:
    """Logits in float32. A head whose numbers overflow drafts badly; it must not decide what becomes of the text."""
    return logits.float().nan_to_num(-OVERFLOW, OVERFLOW, -OVERFLOW)


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
