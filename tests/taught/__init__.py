"""Random draft heads that are taught known texts: what is never accepted proves little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.draft.blocks import BlockDrafter
from specmamba.draft.heads import MTPDrafter
from specmamba.draft.ngram import NgramDrafter
from specmamba.draft.suffix import SuffixDrafter
from specmamba.draft.text_drafter import read_corpus
from specmamba.engine.engine import Engine
from specmamba.layers.context import ForwardContext
from specmamba.models.base import BlockHead, DraftHead


def teach(engine: Engine, texts: list[list[int]], folder: Path) -> None:
    """Let a random head, or n-grams, guess from texts to come, and not always right; another model drafts as before.

    ``folder`` gets a file of no meaning, whose place a corpus takes.
    """
    drafter = engine.runner.drafter
    if isinstance(drafter, MTPDrafter):
        drafter.head = TaughtHead(drafter.head, bigrams(texts, engine.vocab_size))
    elif isinstance(drafter, BlockDrafter):
        table = bigrams(texts, engine.vocab_size)
        table[::5] = table[::5].roll(1, -1)
        drafter.head = TaughtBlocks(drafter.head, table)
    elif isinstance(drafter, NgramDrafter | SuffixDrafter):
        (folder / "corpus.txt").write_text("any text")
        tokens = [token for text in texts for token in text]
        tokens[::6] = [1] * len(tokens[::6])
        corpus = read_corpus(folder / "corpus.txt", lambda _: tokens, engine.vocab_size)
        kind = NgramDrafter if isinstance(drafter, NgramDrafter) else SuffixDrafter
        engine.runner.drafter = kind(engine.draft_plan, engine.config, engine.pools.table, corpus)


class TaughtBlocks:
    """Runs a head, but drafts what followed the same tokens in known texts. Its states are the drafted tokens."""

    def __init__(self, head: BlockHead, table: Tensor) -> None:
        self._head, self._table = head, table
        self.width, self.block_size, self.variant = head.width, head.block_size, head.variant
        self.drafts_at_root, self.views, self.links = head.drafts_at_root, head.views, head.links
        self.confidence = head.confidence
        self.combine, self.remember = head.combine, head.remember

    def forward(self, roots: Tensor, contexts: Sequence[ForwardContext]) -> Tensor:
        states = torch.zeros_like(self._head.forward(roots, contexts))
        for depth in range(states.shape[1]):
            states[:, depth, 0] = roots
            roots = self._table[roots].argmax(-1)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        return self._table[hidden[..., 0].long()]


class TaughtHead:
    """Runs a head, but drafts the token that followed the same token in known texts. Its states are the tokens."""

    def __init__(self, head: DraftHead, table: Tensor) -> None:
        self._head, self._table = head, table
        self.width, self.num_modules, self.combine = head.width, head.num_modules, head.combine

    def forward(self, tokens: Tensor, hidden: Tensor, *context: Any) -> Tensor:
        states = torch.zeros_like(self._head.forward(tokens, hidden, *context))
        states[..., 0] = tokens
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        return self._table[hidden[..., 0].long()]


def bigrams(texts: list[list[int]], vocab_size: int) -> Tensor:
    """How often a token follows another, [V, V]; what never did is told apart by a small random number."""
    table = torch.rand(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0))
    for text in texts:
        for first, second in pairwise(text):
            table[first, second] += 1
    return table
