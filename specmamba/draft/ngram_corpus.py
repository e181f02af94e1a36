"""A fixed text to look n-grams up in, and the file it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specmamba.draft.ngram_match import NO_TOKEN, Matches, MatchRule, last_tokens
from specmamba.errors import ConfigError


def read_corpus(path: Path, encode: Callable[[str], Sequence[int]], vocab_size: int | None = None) -> Tensor:
    """The tokens of a text file, [n] int64.

    Args:
        path: the file.
        encode: makes tokens of its text.
        vocab_size: of the model; None: whatever ``encode`` returns is in its vocabulary.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, has no text in it, or tokens that the model does not know.
    """
    flag = "--speculative-ngram-corpus"
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: {path} is not a UTF-8 text: byte {error.start} of it is not valid") from None
    tokens = torch.tensor(encode(text) if text.strip() else [], dtype=torch.int64)
    if not len(tokens):
        raise ConfigError(f"{flag}: {path} has no text in it; leave the flag out to draft from the request's own text")
    if vocab_size is not None and int(tokens.amax()) >= vocab_size:
        raise ConfigError(
            f"{flag}: the tokenizer makes token {int(tokens.amax())} of {path}, and the model has {vocab_size} tokens"
        )
    return tokens


class CorpusIndex:
    """All positions of a corpus, ordered by the tokens that end there: the last token first, then the one before it.

    Where a text's last tokens would stand in this order, the longest matches are the nearest neighbours. The order is
    made by prefix doubling ("Suffix arrays: a new method for on-line string searches", SIAM J. Comput. 22, 1993): the
    ranks of two adjoining windows make the rank of the window of twice the length. The distinct pairs of every
    doubling are kept, sorted, so that a query finds its own rank by one ``searchsorted`` per doubling, for all texts at
    once. Tokens are compared, never hashed.

    Memory: 12 bytes per token, and 8 bytes per distinct window of 2, 4, 8, ... tokens: with windows of up to 16 tokens
    never more than 44 bytes per token.
    """

    def __init__(self, tokens: Tensor, max_window: int) -> None:
        """Index the corpus.

        Args:
            tokens: [n] int64, not negative, n >= 1.
            max_window: tokens that matches are compared on at the most.
        """
        self._tokens = tokens.int()
        num_doublings = (max_window - 1).bit_length()
        # Ranks of what is in the corpus are even: what is not gets an odd one, between its neighbours. 0: no token.
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
        """Where the last tokens of each text stand in the corpus: the longest matches first.

        Args:
            history: [B, L] int32, the texts.
            lengths: [B] int64, tokens of each text.
            rule: what to look for; ``max_window`` as this index was made for.
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
        """How many positions of the corpus come before these last tokens [B, W] in the order: [B] int64."""
        rank = (2 * suffix.long() + 2).clamp(max=self._radix - 1)
        for pairs in self._pairs:
            pair = rank[:, 0::2] * self._radix + rank[:, 1::2]
            index = torch.searchsorted(pairs, pair)
            is_found = pairs[index.clamp(max=len(pairs) - 1)] == pair
            rank = 2 * index + 1 + is_found
        return torch.searchsorted(self._ranks, rank[:, 0].int())
