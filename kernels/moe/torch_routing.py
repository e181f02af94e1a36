"""From a router's scores to experts and weights, in PyTorch, in float32. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.moe.operands import Routing

TINY = 1e-20  # keeps a sum of weights that all vanish from being divided by


def softmax_routing(logits: Tensor, k: int, renormalise: bool) -> Routing:
    """The k likeliest of all experts.

    Args:
        logits: [T, E] float32.
        k: experts of a token.
        renormalise: a token's weights sum to 1; else they are the probabilities among all experts.
    """
    weights, experts = logits.softmax(-1).topk(k, -1)
    return Routing(experts, weights / weights.sum(-1, keepdim=True) if renormalise else weights)


def topk_softmax_routing(logits: Tensor, k: int) -> Routing:
    """The k likeliest experts, and the softmax over these alone; logits [T, E] float32."""
    weights, experts = logits.topk(k, -1)
    return Routing(experts, weights.softmax(-1))


def sigmoid_routing(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, topk_groups: int, renormalise: bool, scale: float
) -> Routing:
    """The k best experts of the best groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    A bias that balances the load decides who is best, and does not count in the weights. A group is as good as its
    two best experts together.

    Args:
        logits: [T, E] float32.
        bias: [E] float32.
        k: experts of a token.
        num_groups: equal runs of experts.
        topk_groups: groups that a token may choose from.
        renormalise: a token's weights sum to 1 before they are scaled.
        scale: multiplies all weights.
    """
    scores = logits.sigmoid()
    rank = scores + bias
    if topk_groups < num_groups:
        rank = _of_best_groups(rank, num_groups, topk_groups)
    experts = rank.topk(k, -1).indices
    weights = scores.gather(-1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return Routing(experts, weights * scale)


def _of_best_groups(rank: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """[T, E], -inf for the experts of other groups."""
    grouped = rank.unflatten(-1, (num_groups, -1))
    of_groups = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    best = of_groups.topk(topk_groups, -1).indices
    is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, best, True)
    allowed: Tensor = grouped.masked_fill(~is_best[..., None], float("-inf")).flatten(-2)
    return allowed
