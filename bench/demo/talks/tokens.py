"""Conversations as tokens, and sequences that are in part conversations and in part source code."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specmamba.bench.demo.checkpoint import END_OF_TEXT, WindowSampler
from specmamba.bench.demo.talks.conversations import conversations
from specmamba.errors import ConfigError


@dataclass(frozen=True)
class ChatTokens:
    """Conversations in one stream of N tokens, an end-of-text token after each."""

    tokens: Tensor  # [N] int16
    learned: Tensor  # [N] bool, what the model writes itself
    starts: Tensor  # [num_conversations] int64, where each begins
    digest: str


def chat_tokens(tokenizer: Tokenizer, count: int, seed: int) -> ChatTokens:
    """Draw conversations and encode them."""
    ids, learned, starts = list[int](), list[bool](), list[int]()
    for talk in itertools.islice(conversations(seed), count):
        starts.append(len(ids))
        for text, is_learned in talk.pieces():
            encoded = tokenizer.encode(text).ids
            ids += encoded
            learned += [is_learned] * len(encoded)
        ids.append(END_OF_TEXT)
        learned.append(False)
    tokens = torch.tensor(ids, dtype=torch.int16)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    return ChatTokens(tokens, torch.tensor(learned), torch.tensor(starts), digest)


class MixedSampler:
    """Sequences of conversations, which begin with one, and windows of source code."""

    def __init__(self, code: WindowSampler, chat: ChatTokens, share: float) -> None:
        """``share``: of conversations among the sequences of a batch."""
        self._code, self._chat = code, chat
        self._num_chat = round(share * code.batch)
        self._starts = chat.starts[chat.starts + code.seq <= len(chat.tokens)]
        if not len(self._starts):
            raise ConfigError(
                f"--conversations: {len(chat.tokens)} tokens of conversations, fewer than --seq {code.seq}"
            )

    def next(self) -> tuple[Tensor, Tensor]:
        """Draw sequences ``[batch, seq]`` int64, and which of their tokens are learned (bool)."""
        code = self._code.next()[self._num_chat :]
        chosen = torch.randint(len(self._starts), (self._num_chat, 1), generator=self._code.generator)
        places = self._starts[chosen] + torch.arange(self._code.seq)
        tokens = torch.cat([self._chat.tokens[places].long(), code])
        return tokens, torch.cat([self._chat.learned[places], torch.ones_like(code, dtype=torch.bool)])
