"""What requests ask of logits besides a choice: biases, tokens that are not allowed, and how likely tokens are."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """Logits with something added to some tokens of some rows, at every node.

    Args:
        logits: [B, N, V]; sums are float32 at least, so that a small bias is not rounded away.
        rows: [K] int64.
        tokens: [K] int64; a pair of row and token stands there once.
        values: [K] float32.

    Returns:
        [B, N, V], new memory.
    """
    biased = logits.clone() if logits.dtype == torch.float32 else logits.float()
    added = values[:, None].expand(-1, logits.shape[1])
    biased.transpose(1, 2).index_put_((rows, tokens), added, accumulate=True)
    return biased


def allow_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits that are -inf where a token may not follow.

    Args:
        logits: [B, N, V].
        bits: [B, N, ceil(V / 32)] int32; bit t % 32 of word t // 32 is set where token t is allowed.
    """
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((bits[..., None] >> shifts) & 1).flatten(-2)[..., : logits.shape[-1]]
    return torch.where(is_allowed > 0, logits, -torch.inf)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """How likely tokens are, and which would be likelier.

    Args:
        logits: [..., V].
        tokens: [...] int64.
        num_top: how many of the likeliest.

    Returns:
        Log probabilities of the tokens [...] float32; those of the likeliest [..., num_top] float32, falling, and which
        they are [..., num_top] int64.
    """
    logits = logits.float()
    total = logits.logsumexp(-1)
    own = logits.gather(-1, tokens[..., None]).squeeze(-1) - total
    top = logits.topk(num_top, -1)
    return own, top.values - total[..., None], top.indices
