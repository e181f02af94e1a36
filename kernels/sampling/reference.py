"""Choosing tokens, one node and one token at a time: the specification of this op.

Sources: counter-based generators, Salmon et al., SC 2011; the finalizer of splitmix64, Steele, Lea and Flood,
OOPSLA 2014; top-p, arXiv 1904.09751, section 3; min-p, arXiv 2407.01082, section 3; repetition penalty,
arXiv 1909.05858, section 4.1; speculative sampling, arXiv 2302.01318 (algorithm 2) and 2211.17192 (section 2.3);
several children of one node, tried in turn, arXiv 2305.09781 (section 4.3); drawn without replacement,
arXiv 2402.14160. See README.md for the order of the filters.

Shapes: B batch, N tree nodes, V vocabulary. Logits are float32 or float64 (narrower ones are widened to float32); the
arithmetic of drawing and accepting is Python's, in float64. Parameters are trusted: callers refuse negative
temperatures and the like.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Strengths = tuple[Tensor, Tensor, Tensor]  # presence, frequency, repetition: [B] float32 each
Filter = Tensor | None  # [B], the setting of every row; None: no row is filtered
LEAST_MASS = 2.0**-110  # drafts: less counts as none, so that narrower arithmetic can divide by what is left
OVERFLOW = 1e4  # of drafts: stands for logits that are not finite
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = 0xD1342543DE82EF95


def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Reproducible uniforms: seeds [B] int64, positions [B, N] int64 -> float32 [B, N] in [0, 1).

    A pure function of (seed, stream, position).
    """
    out = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    for b, seed in enumerate(seeds.tolist()):
        for n, position in enumerate(positions[b].tolist()):
            key = _mix((seed + _GOLDEN + stream * _STREAM) & _MASK)
            bits = _mix((key + (position + 1) * _GOLDEN) & _MASK)
            out[b, n] = (bits >> 40) / 2**24  # 24 bits: every value is an exact float32 below 1
    return out


def probabilities(logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter) -> Tensor:
    """The distribution that is sampled from.

    logits [B, N, V]; temperature, top_p, min_p [B] float32; top_k [B] int64; filters in the order of the entry.
    Top-p keeps at least one token. Returns [B, N, V], float32 for float32 logits.
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


def checked_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Both of the above."""
    return argmax(logits), has_finite_max(logits)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter, uniforms: Tensor
) -> Tensor:
    """Inverse-CDF sampling in token-id order: the smallest id whose cumulative probability exceeds the uniform.

    The uniform [B, N] is measured against the rounded total rather than against 1, so a token of probability 0 is
    never returned. Returns tokens [B, N] int64.
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
    logits: Tensor, output_counts: Tensor, prompt_mask: Tensor, tokens: Tensor, ancestors: Tensor, strengths: Strengths
) -> Tensor:
    """Penalise tokens that already occurred on each node's own path.

    The output of a node is output_counts [B, V] and the tokens [B, N] of its ancestors [B, N, N] below the root.
    Returns new logits [B, N, V], at least float32; no input is written.
    """
    presence, frequency, repetition = strengths
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


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """logits [B, N, V], rows, tokens [K] int64, values [K] -> [B, N, V] float32."""
    biased = logits.clone().float()
    for row, token, value in zip(rows.tolist(), tokens.tolist(), values.tolist(), strict=True):
        for node in range(logits.shape[1]):
            biased[row, node, token] += value
    return biased


def allow_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    """logits [B, N, V], bits [B, N, ceil(V / 32)] int32 -> [B, N, V]; the bits are read as the entry says."""
    allowed = logits.clone()
    for row in range(logits.shape[0]):
        for node in range(logits.shape[1]):
            words = [word % (1 << 32) for word in bits[row, node].tolist()]
            for token in range(logits.shape[2]):
                if not words[token // 32] >> token % 32 & 1:
                    allowed[row, node, token] = -torch.inf
    return allowed


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [..., V], tokens [...] -> log probabilities [...], and values and ids of the likeliest [..., num_top]."""
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


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of every row, the lowest id on ties, and their log probabilities.

    logits [..., V] -> [..., k] int64 and float32; numbers that are not finite count as +-OVERFLOW, NaN as -OVERFLOW.
    """
    finite = logits.float().nan_to_num(-OVERFLOW, OVERFLOW, -OVERFLOW)
    tokens = torch.empty(*logits.shape[:-1], k, dtype=torch.int64, device=logits.device)
    for row, chosen in zip(finite.view(-1, logits.shape[-1]).tolist(), tokens.view(-1, k), strict=True):
        chosen.copy_(torch.tensor(sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]))
    return tokens, finite.log_softmax(-1).gather(-1, tokens)


def draw_children(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws without replacement: probs [B, F, V], uniforms [B, F, k] in [0, 1).

    Returns tokens [B, F, k] int64 and is_drawn [B, F, k] bool; where no mass was left, a token is 0 and not drawn.
    """
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=probs.device)
    is_drawn = torch.zeros(uniforms.shape, dtype=torch.bool, device=probs.device)
    for b in range(probs.shape[0]):
        for f in range(probs.shape[1]):
            left = probs[b, f].tolist()
            for j, uniform in enumerate(uniforms[b, f].tolist()):
                if sum(left) > LEAST_MASS:
                    tokens[b, f, j] = token = invert_cdf(left, uniform)
                    is_drawn[b, f, j] = True
                    left[token] = 0.0
    return tokens, is_drawn


def residual_choice(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    max_children: int,
    accept_uniforms: Tensor,
    choice_uniforms: Tensor,
) -> Tensor:
    """Choose a token after every node, an accepted child's where there is one.

    probs [B, N, V]; tokens, parents [B, N] int64; draft_probs [B, N, V] or None; accept_uniforms (of the child that is
    tried) and choice_uniforms (of the node after which is chosen) [B, N] in [0, 1). Of a node's children, the first
    max_children are tried.

    Returns [B, N] int64.
    """
    choice = torch.zeros_like(tokens)
    for b, row in enumerate(parents.tolist()):
        for node in range(len(row)):
            children = [child for child, parent in enumerate(row) if parent == node][:max_children]
            choice[b, node] = choose(
                probs[b, node].tolist(),
                None if draft_probs is None or not children else draft_probs[b, node].tolist(),
                [int(tokens[b, child]) for child in children],
                [float(accept_uniforms[b, child]) for child in children],
                float(choice_uniforms[b, node]),
            )
    return choice


def choose(p: list[float], q: list[float] | None, tokens: list[int], tries: list[float], uniform: float) -> int:
    """The token after one node, whose children have these different tokens.

    ``p`` [V] is the target's distribution, ``q`` [V] what the children were drawn from; ``tries`` has a random number
    for each child, ``uniform`` is for the draw when all are refused.
    """
    residual, left = p, [0.0] * len(p) if q is None else q
    for token, u in zip(tokens, tries, strict=True):
        is_drawn = left[token] > 0 and sum(left) > LEAST_MASS
        residual, proposal = normalised(residual), normalised(left) if is_drawn else point_mass(token, len(p))
        if u * proposal[token] < residual[token]:
            return token
        residual = without([max(r - d, 0.0) for r, d in zip(residual, proposal, strict=True)], [token])
        left = without(left, [token])
    for weights in (residual, without(p, tokens)):
        if sum(weights) > 0:
            return invert_cdf(weights, uniform)
    return invert_cdf(p, uniform)


def invert_cdf(weights: list[float], uniform: float) -> int:
    """The smallest token whose cumulative weight exceeds the uniform's share of the total."""
    threshold, cumulative = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative > threshold:
            return token
    raise ValueError("no weight is positive")


def normalised(weights: list[float]) -> list[float]:
    """weights [V] with sum 1, or unchanged when they have none."""
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else weights


def without(weights: list[float], tokens: list[int]) -> list[float]:
    """weights [V] with no mass on these tokens."""
    return [0.0 if token in tokens else weight for token, weight in enumerate(weights)]


def point_mass(token: int, size: int) -> list[float]:
    """All mass on one of ``size`` tokens."""
    return [float(other == token) for other in range(size)]


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
