"""Measuring the quality of a draft head: the rank that it gives to every true next token, at every depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, PrefillChunk, Verdict
from specmamba.draft.drafter import Drafter, HostPendingTokens, chain_shape
from specmamba.draft.heads import MTPDrafter


class RankRecorder(Drafter):
    """Drafts nothing. At every root it runs the head along the forced tokens and records the ranks of these tokens.

    The acceptance of any static tree on that text follows from them without running it: a node is on the accepted path
    if the ranks on its path are the recorded ones.
    """

    has_pending_tokens = True

    def __init__(self, mtp: MTPDrafter, num_steps: int) -> None:
        self.max_nodes = num_steps + 1
        self.mtp = mtp
        self._num_steps = num_steps
        self._ranks: list[Tensor] = []

    @property
    def ranks(self) -> Tensor:
        """[samples, steps] int64: rank (0: likeliest) of the token d + 1 positions after each root, given those before.

        It is -1 after the end of the forced tokens.
        """
        empty = torch.zeros(0, self._num_steps, dtype=torch.int64)
        return torch.cat([empty, *(ranks.cpu() for ranks in self._ranks)])

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self.mtp.begin(row, tokens)

    def resume(self, row: int, features: Tensor, position: int) -> None:
        self.mtp.resume(row, features, position)

    def features(self, row: int, position: int) -> Tensor | None:
        return self.mtp.features(row, position)

    def begin_finish(self, rows: Sequence[int]) -> HostPendingTokens:
        return self.mtp.begin_finish(rows)

    def finish(self, batch: Batch) -> None:
        self.mtp.finish(batch)

    def extend(self, chunk: PrefillChunk, features: Tensor) -> None:
        self.mtp.extend(chunk, features)

    def prepare(self, rows: Sequence[int], batch_size: int, drafts: bool = True) -> HostPendingTokens:
        return self.mtp.prepare_pending(rows, is_deferred=False)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        self.mtp.observe(batch, verdict, features)

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        self.mtp.advance(rows, decided)

    def propose(self, batch: Batch) -> DraftTree:
        """Return the root alone, after ranking the forced tokens that follow it, if there are any."""
        hidden = self.mtp.catch_up(batch)
        if batch.forced_output_ids is not None:
            self._ranks.append(self._rank(batch, hidden, batch.forced_output_ids))
        return DraftTree(batch.root_tokens[:, None], chain_shape(batch.size, 1, hidden.device))

    def _rank(self, batch: Batch, hidden: Tensor, forced: Tensor) -> Tensor:
        columns = []
        for depth in range(self._num_steps):
            token = forced[:, depth : depth + 1].clamp(min=0)
            logits = self.mtp.head.logits(hidden)[:, 0]
            rank = (logits > logits.gather(1, token)).sum(1)
            columns.append(rank.where(forced[:, depth] >= 0, -1))
            if depth + 1 < self._num_steps:
                hidden = self.mtp.descend(batch, token, hidden, depth + 1, None, depth + 1)
        return torch.stack(columns, 1)
