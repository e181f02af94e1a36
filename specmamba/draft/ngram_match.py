"""Earlier occurrences of a text's last tokens in the text itself, and what followed them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NO_TOKEN = -1  # before the beginning of a text, or behind its end


@dataclass(frozen=True, slots=True)
class Matches:
    """Occurrences of the last tokens of B texts, the best first, and what followed each of them."""

    lengths: Tensor  # [B, C] int64, tokens that agree; 0: there is no such match
    continuations: Tensor  # [B, C, S] int64; NO_TOKEN from where the text of the match ends


@dataclass(frozen=True, slots=True)
class MatchRule:
    """What counts as a match, and how much of it is wanted."""

    min_window: int  # tokens that must agree at least
    max_window: int  # tokens that are compared at the most
    num_steps: int  # S, tokens of a continuation
    max_matches: int  # matches per text


def last_tokens(history: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last ``count`` tokens of each text, the newest first: [B, count] int32, NO_TOKEN before its beginning."""
    source = lengths[:, None] - 1 - torch.arange(count)
    return history.gather(1, source.clamp(min=0)).where(source >= 0, NO_TOKEN)


def match_history(history: Tensor, lengths: Tensor, rule: MatchRule) -> Matches:
    """Where the last tokens of each text stood in it before: the longest matches first, of these the most recent.

    A match that ends ``d`` tokens before the end of the text has d known tokens behind it. Longer continuations go
    round in them, which is what a text with the period d does.

    Args:
        history: [B, L] int32, the texts.
        lengths: [B] int64, tokens of each text, 1 to L; what stands behind them does not matter.
        rule: what to look for.
    """
    width, last = history.shape[1], lengths[:, None] - 1
    agreeing = _agreeing(history, lengths, rule.max_window)
    score = agreeing.int() * width + torch.arange(width - 1, dtype=torch.int32)
    best = score.topk(min(rule.max_matches, width - 1)).values.long()
    best = best[:, : int((best >= rule.min_window * width).sum(1).amax())]
    agreeing, end = best // width, best % width
    is_match = agreeing >= rule.min_window
    period = (last - end).clamp(min=1)
    source = end[..., None] + 1 + torch.arange(rule.num_steps) % period[..., None]
    tokens = history.gather(1, source.flatten(1).clamp(max=width - 1)).view_as(source).long()
    return Matches(agreeing * is_match, tokens.where(is_match[..., None], NO_TOKEN))


def _agreeing(history: Tensor, lengths: Tensor, max_window: int) -> Tensor:
    """How many tokens that end at each earlier position agree with the last ones: [B, L - 1] int8.

    Shifted views of whole texts are compared, one window after the other, as long as any agree. NumPy does this in a
    fifth of PyTorch's time.
    """
    suffix = last_tokens(history, lengths, max_window).numpy()
    text, num_ends = history.numpy(), history.shape[1] - 1
    agrees = text[:, :num_ends] == suffix[:, :1]
    agrees &= np.arange(num_ends) < lengths.numpy()[:, None] - 1
    agreeing = agrees.astype(np.int8)
    for back in range(1, min(max_window, num_ends)):
        agrees[:, :back] = False
        agrees[:, back:] &= text[:, : num_ends - back] == suffix[:, back : back + 1]
        if not agrees.any():
            break
        agreeing += agrees
    return torch.from_numpy(agreeing)
