"""Choosing tokens, one node and one token at a time: the specification of this op.

Sources: counter-based generators, Salmon et al., SC 2011; the finalizer of splitmix64, Steele, Lea and Flood,
OOPSLA 2014; top-p, arXiv 1904.09751, section 3; min-p, arXiv 2407.01082, section 3; repetition penalty,
arXiv 1909.05858, section 4.1. See README.md for the order of the filters.

Shapes: B batch, N tree nodes, V vocabulary. Logits are float32 or float64 (narrower ones are widened to float32).
Parameters are trusted; whoever builds them refuses negative temperatures and the like.
"""

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = 0xD1342543DE82EF95


def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Reproducible uniforms: seeds [B] int64, positions [B, N] int64 -> float32 [B, N] in [0, 1).

    A pure function of (seed, stream, position): the same request draws the same number at the same position in any
    batch. Streams keep apart what is drawn at one position for different ends.
    """
    out = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    for b, seed in enumerate(seeds.tolist()):
        for n, position in enumerate(positions[b].tolist()):
            key = _mix((seed + _GOLDEN + stream * _STREAM) & _MASK)
            bits = _mix((key + (position + 1) * _GOLDEN) & _MASK)
            out[b, n] = (bits >> 40) / 2**24  # 24 bits: every value is an exact float32 below 1
    return out


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """The distribution that is sampled from.

    logits [B, N, V]; temperature, top_p, min_p [B] float32; top_k [B] int64, <= 0 keeps all. A filter that is None
    keeps all in every row.
    Order: temperature, top-k (ties with the k-th are kept), top-p over what is left (smallest set that reaches
    top_p, at least one token, equal probabilities ranked by lower id first), min-p relative to the largest
    probability, renormalise. Temperature 0 gives a one-hot on the argmax, the lowest id on ties.

    Returns [B, N, V], float32 for float32 logits.
    """
    out = torch.zeros(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for b in range(logits.shape[0]):
        for n in range(logits.shape[1]):
            row = logits[b, n].to(out.dtype)
            if temperature[b] == 0:
                out[b, n, _argmax(row)] = 1.0
                continue
            kept = _top_k(row / temperature[b], 0 if top_k is None else int(top_k[b]))
            probs = torch.softmax(kept, dim=0)
            probs = _top_p(probs, 1.0 if top_p is None else float(top_p[b]))
            if min_p is not None:
                probs = torch.where(probs < min_p[b] * probs.max(), 0.0, probs)
            out[b, n] = probs / probs.sum()
    return out


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of each row: logits [B, N, V] -> [B, N] int64, the lowest id on ties."""
    return torch.tensor([[_argmax(row) for row in rows] for rows in logits], dtype=torch.int64)


def has_finite_max(logits: Tensor) -> Tensor:
    """Whether a token can be chosen: no logit of a row is NaN or +inf, not all are -inf; [B, N, V] -> [B, N] bool."""
    spoilt = logits.isnan() | (logits == torch.inf)
    return ~spoilt.any(-1) & (logits > -torch.inf).any(-1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """Inverse-CDF sampling in token-id order: the smallest id whose cumulative probability exceeds the uniform.

    Arguments as for ``probabilities``, and uniforms [B, N] in [0, 1). The uniform is measured against the rounded
    total rather than against 1, so a token of probability 0 is never returned. Temperature 0 gives the argmax.

    Returns tokens [B, N] int64.
    """
    probs = probabilities(logits, temperature, top_k, top_p, min_p)
    tokens = torch.zeros(probs.shape[:2], dtype=torch.int64, device=logits.device)
    for b in range(probs.shape[0]):
        for n in range(probs.shape[1]):
            row = probs[b, n].tolist()
            threshold, cumulative = float(uniforms[b, n]) * sum(row), 0.0
            for token, probability in enumerate(row):
                cumulative += probability
                if cumulative > threshold:
                    tokens[b, n] = token
                    break
    return tokens


def penalize(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Penalise tokens that already occurred on each node's own path.

    logits [B, N, V], output_counts [B, V] int32 (committed output tokens, the root included when it is one),
    prompt_mask [B, V] bool, tokens [B, N] int64, ancestors [B, N, N] bool inclusive,
    presence, frequency, repetition [B] float32 (neutral: 0, 0, 1).

    The output history of a node is output_counts plus the tokens of its inclusive ancestors below the root.
    Repetition goes first (prompt and output: positive logits are divided, others multiplied), then frequency
    (subtracted once per occurrence in the output), then presence (subtracted once if it occurred in the output).

    Returns new logits [B, N, V], at least float32; no input is written.
    """
    out = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for b in range(tokens.shape[0]):
        for n in range(tokens.shape[1]):
            counts = output_counts[b].clone()
            for node in range(1, tokens.shape[1]):
                if bool(ancestors[b, n, node]):
                    counts[tokens[b, node]] += 1
            for token, count in enumerate(counts.tolist()):
                value = out[b, n, token]
                if count > 0 or bool(prompt_mask[b, token]):
                    value = value / repetition[b] if value > 0 else value * repetition[b]
                if count > 0:
                    value = value - frequency[b] * count - presence[b]
                out[b, n, token] = value
    return out


def _mix(z: int) -> int:
    """The splitmix64 finalizer over 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _argmax(row: Tensor) -> int:
    """The lowest id among the largest values of row [V]."""
    values = row.tolist()
    return int(values.index(max(values)))


def _top_k(row: Tensor, k: int) -> Tensor:
    """row [V] with everything below its k-th largest value at -inf."""
    if k <= 0 or k >= row.shape[0]:
        return row
    kth = sorted(row.tolist(), reverse=True)[k - 1]
    return torch.where(row < kth, float("-inf"), row)


def _top_p(probs: Tensor, p: float) -> Tensor:
    """probs [V] with everything outside the smallest set that reaches mass p at 0, renormalised."""
    if p >= 1:  # a rounded running sum may reach 1 before the tail is through
        return probs
    kept, mass = torch.zeros_like(probs), 0.0
    for token in sorted(range(probs.shape[0]), key=lambda token: (-float(probs[token]), token)):
        if mass >= p and mass > 0:
            break
        kept[token] = probs[token]
        mass += float(probs[token])
    return kept / kept.sum()
