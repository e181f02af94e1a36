"""Earlier occurrences of a text's last tokens in the text itself, and what followed them."""

from __future__ import annotations

from dataclasses import dataclass

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
    suffix = last_tokens(history, lengths, rule.max_window)
    is_hit = history[:, :-1] == suffix[:, :1]
    is_hit &= torch.arange(width - 1) < last
    row, end = is_hit.nonzero(as_tuple=True)
    before = end[:, None] - torch.arange(rule.max_window)
    agrees = (history[row[:, None], before.clamp(min=0)] == suffix[row]) & (before >= 0)
    agreeing = agrees.cumprod(1).sum(1)
    if rule.min_window > 1:
        is_long = agreeing >= rule.min_window
        row, end, agreeing = row[is_long], end[is_long], agreeing[is_long]
    picked, is_match = _best_of_each(row, agreeing * width + end, len(history), rule.max_matches)
    end, agreeing = end[picked], agreeing[picked] * is_match
    period = (last - end).clamp(min=1)
    source = end[..., None] + 1 + torch.arange(rule.num_steps) % period[..., None]
    tokens = history.gather(1, source.flatten(1).clamp(max=width - 1)).view_as(source).long()
    return Matches(agreeing, tokens.where(is_match[..., None], NO_TOKEN))


def _best_of_each(row: Tensor, score: Tensor, num_rows: int, limit: int) -> tuple[Tensor, Tensor]:
    """The entries with the highest scores of every row.

    Args:
        row: [M] int64 ascending, whose entry it is.
        score: [M] int64, not negative.
        num_rows: rows there are.
        limit: entries of a row at the most.

    Returns:
        Indices of entries [num_rows, C], best first, and [num_rows, C] bool, whether there is such an entry.
    """
    counts = row.bincount(minlength=num_rows)
    limit = min(limit, int(counts.amax()))
    if limit == 0:
        nothing = row.new_zeros(num_rows, 0)
        return nothing, nothing.bool()
    highest = score.amax()
    order = (row * (highest + 1) + highest - score).argsort()
    rank = torch.arange(limit)
    first = (counts.cumsum(0) - counts)[:, None]
    return order[(first + rank).clamp(max=len(row) - 1)], rank < counts[:, None]
