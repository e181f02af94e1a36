"""Sampling in vectorised PyTorch. See README.md."""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the 64-bit constants as torch's signed integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Random numbers in [0, 1) that are a pure function of (seed, position).

    The finalizer of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014)
    over seed and counter; the top 24 bits become a float32.

    Args:
        seeds: [B] int64.
        positions: [B, N] int64.

    Returns:
        [B, N] float32.
    """
    stream = _mix(seeds + _GOLDEN)
    bits = _mix(stream[:, None] + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 40).float() * 2.0**-24


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """The distribution a token is drawn from.

    Temperature first, then top-k (ties with the k-th are kept), then top-p over what is left (the smallest set of the
    likeliest tokens that reaches the mass; equal ones by lower id), then min-p, then renormalised.

    Args:
        logits: [B, N, V].
        temperature: [B] float32; 0 puts all mass on the argmax.
        top_k: [B] int64, <= 0 keeps all; None: no row filters.
        top_p, min_p: [B] float32, 1 and 0 keep all; None: no row filters.

    Returns:
        [B, N, V] float32.
    """
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)  # the largest is 0: no temperature can make it overflow
    is_greedy = (temperature == 0)[:, None, None]
    scaled = logits / temperature.where(temperature != 0, 1)[:, None, None]
    if top_k is not None:
        scaled = _keep_top_k(scaled, top_k)
    probs = scaled.softmax(-1)
    if top_p is not None:
        probs = _keep_top_p(probs, top_p)
    if min_p is not None:
        probs = probs.where(probs >= min_p[:, None, None] * probs.amax(-1, keepdim=True), 0)
    if top_p is not None or min_p is not None:
        probs = probs / probs.sum(-1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
    return torch.where(is_greedy, one_hot, probs)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """Draw one token after every node by inverting the cumulative distribution in order of token id.

    Args:
        logits, temperature, top_k, top_p, min_p: as for ``probabilities``.
        uniforms: [B, N] float32 in [0, 1).

    Returns:
        [B, N] int64.
    """
    probs = probabilities(logits, temperature, top_k, top_p, min_p)
    # float64: over a vocabulary of 250,000 a float32 running sum is off by more than many a token's probability
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    threshold = uniforms[..., None] * cumulative[..., -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return tokens.clamp_(max=probs.shape[-1] - 1)  # only where the logits are not numbers: still an index


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
    """Penalise what each node's own path has said already.

    Args:
        logits: [B, N, V].
        output_counts: [B, V] int32, committed output tokens (the root too when it is one).
        prompt_mask: [B, V] bool, tokens of the prompt; only the repetition penalty looks at them.
        tokens: [B, N] int64; ancestors: [B, N, N] bool.
        presence, frequency, repetition: [B] float32; repetition comes first.

    Returns:
        [B, N, V] float32.
    """
    logits = logits.float()
    counts = output_counts[:, None].to(logits.dtype).repeat(1, tokens.shape[1], 1)
    below_root = ancestors.to(logits.dtype)
    below_root[..., 0] = 0
    counts.scatter_add_(2, tokens[:, None].expand_as(ancestors), below_root)
    was_said = counts > 0
    factor = repetition[:, None, None].where(was_said | prompt_mask[:, None], 1)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None, None] * counts - presence[:, None, None] * was_said


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    vocabulary = scaled.shape[-1]
    k = top_k.where(top_k > 0, vocabulary).clamp(max=vocabulary)
    descending = scaled.sort(-1, descending=True).values
    kth = descending.gather(-1, (k - 1)[:, None, None].expand(-1, scaled.shape[1], 1))
    return scaled.masked_fill(scaled < kth, -torch.inf)


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    keep = (mass_before < top_p[:, None, None]) | (top_p >= 1)[:, None, None]
    keep[..., 0] = True
    return probs.where(torch.zeros_like(keep).scatter_(-1, ids, keep), 0)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own is arithmetic on signed integers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
