"""Several continuations of a text merged into one draft tree."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.draft.ngram_match import NO_TOKEN

DEPTH_DECAY = 0.875


def merge(
    continuations: Tensor, weights: Tensor, max_children: int, max_drafts: int, decay: float = DEPTH_DECAY
) -> tuple[Tensor, Tensor]:
    num_rows, count, num_steps = continuations.shape
    known = continuations != NO_TOKEN
    same = (continuations[:, :, None] == continuations[:, None]) & known[:, None]
    same = same.to(torch.int8).cummin(-1).values.bool()  # [B, C, C, S], whose first s tokens are the same
    support = torch.einsum("bcds,bd->bcs", same.double(), weights)
    score = support * decay ** torch.arange(1, num_steps + 1) * known
    first = same.int().argmax(2)  # [B, C, S], the continuation that stands for a prefix
    candidates = torch.arange(count)
    stands = first == candidates[:, None]
    # rank among siblings
    if max_children < min(count, max_drafts):
        sibling = torch.cat([torch.ones_like(same[..., :1]), same[..., :-1]], -1)
        s_c, s_d = score[:, :, None], score[:, None]
        better = (s_d > s_c) | ((s_d == s_c) & (candidates[:, None] < first[:, :, None]))
        rank = (sibling & better & stands[:, None]).sum(2)
        score = score * (rank < max_children).to(torch.int8).cummin(-1).values
    flat = (score * stands).flatten(1)
    best, node = flat.sort(dim=1, descending=True, stable=True)
    num_drafts = min(max_drafts, int((best > 0).sum(1).amax()))
    best, node = best[:, :num_drafts], node[:, :num_drafts]
    place = torch.zeros_like(flat, dtype=torch.int64).scatter_(1, node, torch.arange(1, num_drafts + 1).expand_as(node))
    above = torch.cat(
        [torch.full_like(first[..., :1], -1), first[..., :-1] * num_steps + torch.arange(num_steps - 1)], -1
    ).flatten(1)
    above = above.gather(1, node)
    parents = place.gather(1, above.clamp(min=0)).where(above >= 0, 0)
    tokens = continuations.flatten(1).gather(1, node)
    is_node = best > 0
    return tokens.where(is_node, 0), parents.where(is_node, -1)
