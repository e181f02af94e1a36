"""The children of draft nodes (the likeliest tokens, or drawn ones), and chains of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree
from specmamba.draft.drafter import chain_shape
from specmamba.kernels import sampling as sampling_ops


@dataclass(frozen=True, slots=True)
class Children:
    """The k children of F nodes, in the order in which acceptance tries them."""

    tokens: Tensor  # [B, F, k] int64
    token_logp: Tensor  # [B, F, k], of the tokens
    place_logp: Tensor  # [B, F, k], not rising: the value of the j-th child, which does not depend on its token
    probs: Tensor | None  # [B, F, V], the distributions that the tokens were drawn from; None: the likeliest tokens


@dataclass(frozen=True, slots=True)
class ChildPicker:
    """Picks children from the logits of a draft head.

    Drafts are drawn for rows that are decided under ``rejection``: the request's own temperature and filters are
    applied to the head's logits, so that the distribution is as near to the target's as the head allows. Other rows get
    the likeliest tokens.
    """

    draws: bool  # whether it draws at all

    def draws_for(self, batch: Batch) -> bool:
        """Whether children are drawn for some row of this batch."""
        return self.draws and batch.sampling.rejects is not None

    def pick(self, logits: Tensor, k: int, batch: Batch, first_entry: int) -> Children:
        """Choose k children for every node.

        Args:
            logits: [B, F, V], of the head after each node.
            k: children per node.
            batch: has the sampling settings and root positions of the rows.
            first_entry: index of the first of these nodes among all nodes of this draft that get children; it gives
                every node random numbers of its own.
        """
        if self.draws_for(batch):
            return _draw(logits, k, batch, first_entry)
        tokens, logp = sampling_ops.likeliest(logits, k)
        return Children(tokens, logp, logp, None)

    def pick_one(self, logits: Tensor, batch: Batch, entry: int) -> tuple[Tensor, Tensor | None]:
        """Choose one child for one node per row, from logits [B, 1, V].

        Returns:
            Tokens [B, 1] int64, and the distributions [B, 1, V] that they were drawn from (None: the likeliest).
        """
        if self.draws_for(batch):
            is_chosen, probs = _distributions(logits, batch)
            drawn, _ = _drawn(probs, 1, batch, entry)
            return torch.where(is_chosen[..., 0], sampling_ops.argmax(probs), drawn[..., 0]), probs
        return sampling_ops.argmax(logits), None


def _draw(logits: Tensor, k: int, batch: Batch, first_entry: int) -> Children:
    is_chosen, probs = _distributions(logits, batch)
    drawn, is_drawn = _drawn(probs, k, batch, first_entry)
    likeliest = probs.topk(k, -1)
    tokens = torch.where(is_chosen, likeliest.indices, drawn)
    place_logp = sampling_ops.log(likeliest.values).masked_fill(~(is_drawn | is_chosen), -torch.inf)
    return Children(tokens, sampling_ops.log(probs.gather(-1, tokens)), place_logp, probs)


def _distributions(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows whose drafts are chosen [B, 1, 1] bool, and what the children of each node are drawn from [B, F, V]."""
    sampling, temperature, draws = batch.sampling, batch.sampling.temperature, batch.sampling.rejects
    assert temperature is not None
    assert draws is not None
    # other rows also need their second choices: these are ranked at temperature 1 and without filters
    spread = temperature.where(draws, 1)
    top_k, top_p, min_p = (
        None if x is None else x.where(draws, neutral)
        for x, neutral in ((sampling.top_k, 0), (sampling.top_p, 1), (sampling.min_p, 0))
    )
    probs = sampling_ops.probabilities(sampling_ops.finite(logits), spread, top_k, top_p, min_p)
    return ~draws[:, None, None], probs


def _drawn(probs: Tensor, k: int, batch: Batch, first_entry: int) -> tuple[Tensor, Tensor]:
    """k tokens after every node, and whether each was drawn, [B, F, k]."""
    entries = torch.arange(first_entry, first_entry + probs.shape[1], device=probs.device)
    counters = (
        (batch.root_positions[:, None, None] << 20) | (entries[:, None] << 8) | torch.arange(k, device=probs.device)
    )
    uniforms = sampling_ops.uniform(batch.sampling.seeds, counters.flatten(1), sampling_ops.DRAFT_STREAM)
    return sampling_ops.draw_children(probs, uniforms.view_as(counters))


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
        num_nodes: the root included.
        hidden: [B, 1, H], the drafting model's states after the roots.
        logits: [B, 1, H] -> [B, 1, V].
        descend: (nodes [B, 1], states at their parents [B, 1, H], their depth) -> states at the nodes [B, 1, H].
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
    draft_probs = (
        torch.cat([*probs, probs[-1]], 1) if probs else None
    )  # the last node has no children, its row is not used
    shape = chain_shape(batch.size, num_nodes, token.device)
    return DraftTree(torch.cat(tokens, 1), shape, draft_probs)
