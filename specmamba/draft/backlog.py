"""What a draft head has yet to be told of each request: tokens that were decided, and the states in front of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.cache.rows import RowSet
from specmamba.core import Batch


class Backlog:
    """By row of the request table, what the next draft starts from: tokens up to the root, and states before each.

    ``before[0]`` has the target's states, ``before[d]`` those of module d - 1 of the head. The target's come with the
    tokens; those of modules stand in the first ``num_complete`` columns of a row only.
    """

    def __init__(
        self, num_rows: int, capacity: int, num_modules: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Args:
        num_rows: of the request table, row 0 counted.
        capacity: tokens of a row.
        num_modules: of the head.
        width: of the states.
        dtype: the same.
        device: of the pools.
        """
        self.capacity, self._width, self._device = capacity, width, device
        self.tokens = torch.zeros(num_rows, capacity, dtype=torch.int64, device=device)
        self.before = [torch.zeros(num_rows, capacity, width, dtype=dtype, device=device) for _ in range(num_modules)]
        self.num_new = [1] * num_rows  # the root is always the last of them
        self.num_complete = [1] * num_rows
        self.root = [0] * num_rows  # positions

    def counts(self, batch: Batch) -> list[int]:
        """Tokens of each row of a batch."""
        return [self.num_new[row] for row in batch.rows]

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """A request starts in this row; ``tokens`` are all that is known of it, root included."""
        for before in self.before:
            before[row].zero_()
        self.tokens[row, 0] = tokens[-1]
        self.num_new[row] = self.num_complete[row] = 1
        self.root[row] = len(tokens) - 1

    def resume(self, row: int, states: Tensor) -> None:
        """A request that has begun goes on behind what ``states_before`` gave."""
        for before, state in zip(self.before, states.split(self._width), strict=True):
            before[row, 0] = state

    def states_before(self, row: int, column: int) -> Tensor:
        """The target's state in front of a token, then those of modules: [D H]."""
        return torch.cat([before[row, column] for before in self.before])

    def add(self, batch: Batch, tokens: Tensor, states: Tensor, counts: Sequence[int]) -> None:
        """Tokens have been decided: the first ``counts[b]`` of tokens [B, N], behind the target's states [B, N, H]."""
        first, num_columns = self.counts(batch), tokens.shape[1]
        rows = RowSet.of(batch.rows, self._device)
        if rows.is_range and len(set(first)) == 1:
            columns = slice(first[0], first[0] + num_columns)
            rows.take(self.tokens)[:, columns] = tokens
            rows.take(self.before[0])[:, columns] = states
        else:
            places = torch.tensor(first, device=self._device)[:, None] + torch.arange(num_columns, device=self._device)
            self.tokens[rows.index[:, None], places] = tokens
            self.before[0][rows.index[:, None], places] = states
        for row, count in zip(batch.rows, counts, strict=True):
            self.num_new[row] += count
            self.root[row] += count

    def complete(self, batch: Batch, given: Sequence[Tensor]) -> None:
        """What modules gave for all tokens, [B, longest, H] each, stands in front of the tokens that follow these."""
        counts = self.counts(batch)
        for before, states in zip(self.before[1:], given[:-1], strict=False):
            before[batch.row_index, 1 : max(counts)] = states[:, :-1]
        for row, count in zip(batch.rows, counts, strict=True):
            self.num_complete[row] = count

    def clear(self, batch: Batch, at_roots: Sequence[Tensor]) -> None:
        """All has been told; what modules gave at the roots, [B, 1, H] each, stands in front of what comes next."""
        for before, states in zip(self.before[1:], at_roots[:-1], strict=False):
            before[batch.row_index, 0] = states[:, 0]
        for row in batch.rows:
            self.num_new[row], self.num_complete[row] = 0, 1
