"""Mixtures of experts, one pair of a token and an expert at a time: the specification of this op, and its operands.

Sums are formed in float32 (float64 for float64 inputs), in ascending order, and rounded once to x's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """The experts of each of T tokens, and their weights."""

    experts: Tensor  # [T, k] int64, from 0 to E - 1, all different in a row
    weights: Tensor  # [T, k] float32


class Groups(NamedTuple):
    """The P = T k pairs of a token and an expert, sorted by expert and, among one expert's, by token."""

    places: Tensor  # [P] int64: the sorted position of pair t k + j, of token t and its j-th expert
    ends: Tensor  # [E] int32: the end of each expert's pairs in sorted order

    @property
    def is_part(self) -> bool:
        """Whether pairs behind the last end belong to experts that are elsewhere: nothing is computed of them."""
        return False


class PartOfGroups(Groups):
    """Groups of some of the experts, in front of the pairs of the others."""

    @property
    def is_part(self) -> bool:
        """As ``Groups.is_part``."""
        return True


def scores(x: Tensor, weight: Tensor) -> Tensor:
    """Scores of all experts: x [T, H], weight [E, H] -> [T, E] float32."""
    return x.float() @ weight.float().t()


def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Groups]:
    """x [T, K] and experts [T, k] -> one row for each pair, sorted by expert [P, K], and the places."""
    places = torch.zeros(experts.numel(), dtype=torch.int64)
    rows: list[Tensor] = []
    ends: list[int] = []
    for expert in range(num_experts):
        for pair, chosen in enumerate(experts.flatten().tolist()):
            if chosen == expert:
                places[pair] = len(rows)
                rows.append(x[pair // experts.shape[1]])
        ends.append(len(rows))
    return torch.stack(rows) if rows else x[:0], Groups(places, torch.tensor(ends, dtype=torch.int32))


def multiply(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """y[p] = W[expert of p] x[p]: x [P, K] sorted, weight [E, N, K] -> [P, N]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape[0], weight.shape[1], dtype=dtype)
    first = 0
    for expert, end in enumerate(groups.ends.tolist()):
        for p in range(first, end):
            for n in range(weight.shape[1]):
                for k in range(weight.shape[2]):
                    y[p, n] += x[p, k].to(dtype) * weight[expert, n, k].to(dtype)
        first = end
    return y.to(x.dtype)


def combine(y: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """out[t] = sum_j weights[t, j] y[place of (t, j)]: y [P, N] sorted, weights [T, k] -> [T, N]."""
    num_tokens, k = weights.shape
    dtype = torch.promote_types(y.dtype, torch.float32)
    out = torch.zeros(num_tokens, y.shape[1], dtype=dtype)
    for t in range(num_tokens):
        for j in range(k):
            out[t] += weights[t, j] * y[groups.places[t * k + j]].to(dtype)
    return out.to(y.dtype)


def softmax_routing(logits: Tensor, k: int, renormalise: bool) -> Routing:
    """The k likeliest of all experts: logits [T, E] -> T x k."""
    return _for_each_token(logits, lambda row: _softmax_choice(row, k, renormalise))


def topk_softmax_routing(logits: Tensor, k: int) -> Routing:
    """The k likeliest experts, and the softmax over these alone: the same as all of them made to sum to 1."""
    return softmax_routing(logits, k, renormalise=True)


def sigmoid_routing(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, topk_groups: int, renormalise: bool, scale: float
) -> Routing:
    """The k best experts of the best groups, as the entry says."""
    biases = bias.tolist()

    def choose(row: list[float]) -> tuple[list[int], list[float]]:
        probs = [1.0 / (1.0 + math.exp(-x)) for x in row]
        rank = [p + b for p, b in zip(probs, biases, strict=True)]
        size = len(row) // num_groups
        groups = [list(range(g * size, (g + 1) * size)) for g in range(num_groups)]
        groups.sort(key=lambda members: -sum(sorted(rank[e] for e in members)[-2:]))
        allowed = [expert for members in groups[:topk_groups] for expert in members]
        chosen = sorted(allowed, key=lambda expert: -rank[expert])[:k]
        weights = [probs[expert] for expert in chosen]
        total = sum(weights) if renormalise else 1.0
        return chosen, [scale * w / total for w in weights]

    return _for_each_token(logits, choose)


def _softmax_choice(row: list[float], k: int, renormalise: bool) -> tuple[list[int], list[float]]:
    powers = [math.exp(x - max(row)) for x in row]
    chosen = sorted(range(len(row)), key=lambda expert: -powers[expert])[:k]
    total = sum(powers[expert] for expert in chosen) if renormalise else sum(powers)
    return chosen, [powers[expert] / total for expert in chosen]


def _for_each_token(logits: Tensor, choose: Callable[[list[float]], tuple[list[int], list[float]]]) -> Routing:
    rows = [choose(row) for row in logits.tolist()]
    experts, weights = ([row[i] for row in rows] for i in range(2))
    return Routing(torch.tensor(experts), torch.tensor(weights, dtype=torch.float32))
