"""Earlier occurrences of a text's last tokens, in the text itself and in a corpus, and what followed them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NO_TOKEN = -1  # before the beginning of a text, and after its end


@dataclass(frozen=True, slots=True)
class Matches:
    """Occurrences of the last tokens of B texts, the best first, and what followed each of them."""

    lengths: Tensor  # [B, C] int64, tokens that agree; 0: padding
    continuations: Tensor  # [B, C, S] int64; NO_TOKEN after the end of the text


@dataclass(frozen=True, slots=True)
class MatchRule:
    """The definition of a match, and how many matches and tokens after them are returned."""

    min_window: int  # smallest number of tokens that must agree
    max_window: int  # largest number of tokens that are compared
    num_steps: int  # S, tokens of a continuation
    max_matches: int  # largest number of matches per text


def last_tokens(history: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return the last ``count`` tokens of each text, newest first: [B, count] int32, NO_TOKEN before its beginning."""
    source = lengths[:, None] - 1 - torch.arange(count)
    return history.gather(1, source.clamp(min=0)).where(source >= 0, NO_TOKEN)


def match_history(history: Tensor, lengths: Tensor, rule: MatchRule) -> Matches:
    """Find earlier occurrences of the last tokens of each text in it: longest first, of equal length the most recent.

    A match that ends ``d`` tokens before the end of the text has d known tokens after it. A longer continuation repeats
    them, as a text with the period d would.

    Args:
        history: [B, L] int32, the texts.
        lengths: [B] int64, tokens of each text, 1 to L; the values after them are not used.
        rule: the definition of a match.
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
    """Count for each earlier position how many tokens up to it agree with the last ones: [B, L - 1] int8.

    Shifted views of whole texts are compared, window by window, until none agree. NumPy needs a fifth of PyTorch's
    time.
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


class CorpusIndex:
    """All positions of a corpus, sorted by the tokens that end there, compared from the last token backwards.

    The longest matches of a text are the neighbours of the place where its last tokens would be inserted. The order is
    made by prefix doubling ("Suffix arrays: a new method for on-line string searches", SIAM J. Comput. 22, 1993): the
    ranks of two adjacent windows give the rank of the window of twice the length. The distinct pairs of every doubling
    are kept, sorted, so that a query finds its rank by one ``searchsorted`` per doubling, for all texts at once. Tokens
    are compared, never hashed.

    Memory: 12 bytes per token, and 8 bytes per distinct window of 2, 4, 8, ... tokens: with windows of up to 16 tokens
    never more than 44 bytes per token.
    """

    def __init__(self, tokens: Tensor, max_window: int) -> None:
        """Index the corpus.

        Args:
            tokens: [n] int64, not negative, n >= 1.
            max_window: largest number of tokens that are compared.
        """
        self._tokens = tokens.int()
        num_doublings = (max_window - 1).bit_length()
        # Windows of the corpus have even ranks; other windows get the odd rank between their neighbours. 0: no token.
        self._radix = 2 * max(len(tokens), int(tokens.amax()) + 1) + 2
        self._pairs: list[Tensor] = []
        rank = 2 * tokens + 2
        for doubling in range(num_doublings):
            pair = rank * self._radix
            pair[1 << doubling :] += rank[: -(1 << doubling)]
            pairs, index = pair.unique(return_inverse=True)
            self._pairs.append(pairs)
            rank = 2 * index + 2
        ranks, order = rank.sort(stable=True)
        self._ranks, self._order = ranks.int(), order.int()

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self._tokens, self._ranks, self._order, *self._pairs))

    def match(self, history: Tensor, lengths: Tensor, rule: MatchRule) -> Matches:
        """Find the last tokens of each text in the corpus: the longest matches first.

        Args:
            history: [B, L] int32, the texts.
            lengths: [B] int64, tokens of each text.
            rule: the definition of a match; its ``max_window`` is the one of this index.
        """
        suffix = last_tokens(history, lengths, 1 << len(self._pairs))
        size, count = len(self._tokens), rule.max_matches
        neighbours = self._place(suffix)[:, None] + torch.arange(-count, count)
        is_there = (neighbours >= 0) & (neighbours < size)
        end = self._order[neighbours.clamp(0, size - 1)].long()
        before = end[..., None] - torch.arange(rule.max_window)
        agrees = (self._tokens[before.clamp(min=0)] == suffix[:, None, : rule.max_window]) & (before >= 0)
        agreeing = agrees.cumprod(2).sum(2) * is_there
        agreeing = agreeing.where(agreeing >= rule.min_window, 0)
        count = min(count, int((agreeing > 0).sum(1).amax()))
        agreeing, best = (x[:, :count] for x in agreeing.sort(dim=1, descending=True, stable=True))
        source = end.gather(1, best)[..., None] + 1 + torch.arange(rule.num_steps)
        is_known = (source < size) & (agreeing > 0)[..., None]
        tokens = self._tokens[source.clamp(max=size - 1)].long()
        return Matches(agreeing, tokens.where(is_known, NO_TOKEN))

    def _place(self, suffix: Tensor) -> Tensor:
        """Return how many positions of the corpus come before these last tokens [B, W] in the order, [B] int64."""
        rank = (2 * suffix.long() + 2).clamp(max=self._radix - 1)
        for pairs in self._pairs:
            pair = rank[:, 0::2] * self._radix + rank[:, 1::2]
            index = torch.searchsorted(pairs, pair)
            is_found = pairs[index.clamp(max=len(pairs) - 1)] == pair
            rank = 2 * index + 1 + is_found
        return torch.searchsorted(self._ranks, rank[:, 0].int())
