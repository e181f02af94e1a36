"""Biases, allowed tokens and log probabilities, one number at a time: the specification of ``torch_constraints``."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """See ``torch_constraints.add_bias``."""
    biased = logits.clone().float()
    for row, token, value in zip(rows.tolist(), tokens.tolist(), values.tolist(), strict=True):
        for node in range(logits.shape[1]):
            biased[row, node, token] += value
    return biased


def allow_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    """See ``torch_constraints.allow_tokens``."""
    allowed = logits.clone()
    for row in range(logits.shape[0]):
        for node in range(logits.shape[1]):
            words = [word % (1 << 32) for word in bits[row, node].tolist()]
            for token in range(logits.shape[2]):
                if not words[token // 32] >> token % 32 & 1:
                    allowed[row, node, token] = -torch.inf
    return allowed


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``torch_constraints.token_logprobs``."""
    own, values, indices = [], [], []
    for row, token in zip(logits.reshape(-1, logits.shape[-1]).tolist(), tokens.flatten().tolist(), strict=True):
        largest = max(row)
        total = largest + math.log(math.fsum(math.exp(x - largest) for x in row))
        order = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:num_top]
        own.append(row[token] - total)
        values.append([row[i] - total for i in order])
        indices.append(order)
    shape = tokens.shape
    top = torch.tensor(values).reshape(*shape, num_top), torch.tensor(indices, dtype=torch.int64)
    return torch.tensor(own).reshape(shape), top[0], top[1].reshape(*shape, num_top)
