"""Decided tokens that a draft head has not run yet, with the states before them, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.request_table import RequestTable
from specmamba.cache.rows import RowSet
from specmamba.core import Batch, PendingTokens


class PendingTokenTable:
    """By row of the request table, what the next draft starts from: tokens up to the root, and states before each.

    ``before[0]`` has the target's states, ``before[d]`` those of module d - 1 of the head. The target's come with the
    tokens; those of modules stand in the first ``num_complete`` columns of a row only.
    """

    def __init__(
        self, num_rows: int, capacity: int, num_modules: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the lists; all rows are empty.

        Args:
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

    def counts(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each of these rows."""
        return tuple(self.num_new[row] for row in rows)

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

    def add(self, batch: Batch, tokens: Tensor, states: Tensor) -> None:
        """Tokens [B, N] have been decided, those beyond what was accepted do not matter, behind states [B, N, H]."""
        assert batch.pending_tokens is not None
        rows, num_columns = RowSet.of_batch(batch), tokens.shape[1]
        first = batch.pending_tokens.max_count if batch.pending_tokens.is_deferred else 0
        if rows.is_range and not (batch.pending_tokens.is_deferred and batch.pending_tokens.counts is not None):
            columns = slice(first, first + num_columns)
            rows.take(self.tokens)[:, columns] = tokens
            rows.take(self.before[0])[:, columns] = states
            return
        places = torch.arange(num_columns, device=self._device)[None]
        if batch.pending_tokens.is_deferred:
            places = places + (first if batch.pending_tokens.counts is None else batch.pending_tokens.counts[:, None])
        self.tokens[rows.index[:, None], places] = tokens
        self.before[0][rows.index[:, None], places] = states

    def advance(self, rows: Sequence[int], counts: Sequence[int], is_deferred: bool) -> None:
        """So many tokens of each row have been added; unless the old ones were kept, they had been told before."""
        for row, count in zip(rows, counts, strict=True):
            if not is_deferred:
                self.num_new[row], self.num_complete[row] = 0, 1
            self.num_new[row] += count
            self.root[row] += count

    def complete(self, batch: Batch, given: Sequence[Tensor]) -> None:
        """What modules gave for all tokens, [B, longest, H] each, stands in front of the tokens that follow these."""
        counts = self.counts(batch.rows)
        for before, states in zip(self.before[1:], given[:-1], strict=False):
            before[batch.row_index, 1 : max(counts)] = states[:, :-1]
        for row, count in zip(batch.rows, counts, strict=True):
            self.num_complete[row] = count

    def tell(self, batch: Batch, at_roots: Sequence[Tensor]) -> None:
        """All has been told; what modules gave at the roots, [B, 1, H] each, stands in front of what comes next."""
        for before, states in zip(self.before[1:], at_roots[:-1], strict=False):
            before[batch.row_index, 0] = states[:, 0]


@dataclass(frozen=True, slots=True)
class Window:
    """Where the head's entries of one draft stand: first those it catches up with, then the root's and its own."""

    positions: Tensor  # [B, root + E] int64; entry m of a draft stands m behind the root
    slots: Tensor  # [B, root + E] int64, of keys and values; 0 for padding
    root: int  # the column of entry 0, which is the root's

    @classmethod
    def of(cls, table: RequestTable, batch: Batch, pending_tokens: PendingTokens, num_entries: int) -> Window:
        """Positions and slots of everything a draft may run, made at once; padding stands at the root.

        Args:
            table: has the slots.
            batch: the roots.
            pending_tokens: tokens of each row that it catches up with, the root counted.
            num_entries: that the draft may make, the root's counted.
        """
        longest, device = pending_tokens.max_count, batch.row_index.device
        offsets = torch.arange(1 - longest, num_entries, device=device)
        if pending_tokens.counts is None:
            positions = batch.root_positions[:, None] + offsets
            return cls(positions, table.slots_at(batch.row_index, positions), longest - 1)
        missing = longest - pending_tokens.counts[:, None]
        moved = offsets + missing  # tokens stand at the left of their columns, what follows the root stays
        positions = batch.root_positions[:, None] + moved.clamp(max=0).maximum(offsets)
        slots = table.slots_at(batch.row_index, positions)
        slots[:, :longest] *= moved[:, :longest] <= 0
        return cls(positions, slots, longest - 1)
