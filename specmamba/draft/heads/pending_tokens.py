"""Decided tokens that a draft head has not run yet, with the states before them, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.access import batch_rows
from specmamba.cache.request_table import RequestTable
from specmamba.core import Batch, PendingTokens


class PendingTokenTable:
    """The pending tokens of every row of the request table, up to and including its root, and the states before each.

    ``before[0]`` has the target's states before the tokens, ``before[d]`` the states of module d - 1 of the head. The
    target's states are added with the tokens; those of modules are valid only in the first ``num_with_states`` columns
    of a row.
    """

    def __init__(
        self, num_rows: int, capacity: int, num_modules: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate zeros for all rows.

        Args:
            num_rows: rows of the request table, row 0 included.
            capacity: tokens that a row can have.
            num_modules: modules of the head.
            width: length of a state vector.
            dtype: type of the states.
            device: device of the pools.
        """
        self.capacity, self._width, self._device = capacity, width, device
        self.tokens = torch.zeros(num_rows, capacity, dtype=torch.int64, device=device)
        self.before = [torch.zeros(num_rows, capacity, width, dtype=dtype, device=device) for _ in range(num_modules)]
        self.num_tokens = [1] * num_rows  # pending tokens of each row; the root is always the last of them
        self.num_with_states = [1] * num_rows
        self.root = [0] * num_rows  # positions of the roots
        self._kept: Tensor | None = None  # [rows, N, width], the target's states before the newest step
        self._kept_from = [0] * num_rows  # position of the token behind the first of them

    def counts(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of pending tokens of these rows."""
        return tuple(self.num_tokens[row] for row in rows)

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """Start a request in this row; ``tokens`` are all its known tokens, root included."""
        for before in self.before:
            before[row].zero_()
        self.restart(row, tokens[-1])
        self.root[row] = len(tokens) - 1

    def resume(self, row: int, states: Tensor) -> None:
        """Continue after a cached prefix, from the states that ``states_before`` returned at its end."""
        for before, state in zip(self.before, states.split(self._width), strict=True):
            before[row, 0] = state

    def states_before(self, row: int, column: int) -> Tensor:
        """Return the target's state before a pending token and those of modules, concatenated: [D * H]."""
        return torch.cat([before[row, column] for before in self.before])

    def add(self, batch: Batch, tokens: Tensor, states: Tensor) -> None:
        """Store the decided tokens [B, N] of a step and the target's states before them [B, N, H].

        Columns after a row's last decided token may hold anything; ``advance`` sets how many of them count.
        """
        pending = batch.pending_tokens
        assert pending is not None
        rows, num_columns = batch_rows(batch), tokens.shape[1]
        first = pending.max_count if pending.is_deferred else 0
        kept = pending.counts if pending.is_deferred and pending.kept is None else pending.kept
        if rows.is_range and kept is None:
            columns = slice(first, first + num_columns)
            rows.take(self.tokens)[:, columns] = tokens
            rows.take(self.before[0])[:, columns] = states
            return
        index = torch.arange(num_columns, device=self._device)[None]
        index = index + (first if kept is None else kept[:, None])
        self.tokens[rows.index[:, None], index] = tokens
        self.before[0][rows.index[:, None], index] = states

    def keep(self, batch: Batch, num_columns: int) -> None:
        """Keep the target's states before pending tokens, so many of each row, while a step adds others."""
        before = self.before[0]
        if self._kept is None:
            self._kept = torch.zeros_like(before[:, :num_columns])
        self._kept[batch.row_index] = before[batch.row_index, :num_columns]

    def kept_before(self, row: int, position: int) -> Tensor:
        """Return the state [H] before the token at a position that was pending before the newest step of a row."""
        assert self._kept is not None
        return self._kept[row, position - self._kept_from[row]]

    def advance(self, rows: Sequence[int], counts: Sequence[int], stay: Sequence[bool]) -> None:
        """Count the tokens that ``add`` stored; earlier ones of a row stay pending only if the step deferred them."""
        for row, count, stays in zip(rows, counts, stay, strict=True):
            self._kept_from[row] = self.root[row] - self.num_tokens[row] + 1
            if not stays:
                self.num_tokens[row], self.num_with_states[row] = 0, 1
            self.num_tokens[row] += count
            self.root[row] += count

    def restart(self, row: int, root_token: int) -> None:
        """Leave the root alone pending; the states in the first column are those before it."""
        self.tokens[row, :1].fill_(root_token)  # to assign a number is to copy it, and the host would wait for that
        self.num_tokens[row] = self.num_with_states[row] = 1

    def store_module_states(self, batch: Batch, outputs: Sequence[Tensor]) -> None:
        """Store the outputs of all modules for all pending tokens, [B, longest, H] each, as states before the next."""
        counts = self.counts(batch.rows)
        for before, states in zip(self.before[1:], outputs[:-1], strict=False):
            before[batch.row_index, 1 : max(counts)] = states[:, :-1]
        for row, count in zip(batch.rows, counts, strict=True):
            self.num_with_states[row] = count

    def store_root_states(self, batch: Batch, at_roots: Sequence[Tensor]) -> None:
        """Store the outputs of all modules at the roots, [B, 1, H] each, as states before the next pending token."""
        for before, states in zip(self.before[1:], at_roots[:-1], strict=False):
            before[batch.row_index, 0] = states[:, 0]


@dataclass(frozen=True, slots=True)
class Window:
    """Positions and KV slots of the head's entries in one draft: of the pending tokens, then of the draft's nodes."""

    positions: Tensor  # [B, root + E] int64; entry m of a draft is m positions after the root
    slots: Tensor  # [B, root + E] int64, KV slots; 0 for padding
    root: int  # the column of entry 0, which is the root's

    @classmethod
    def of(cls, table: RequestTable, batch: Batch, pending_tokens: PendingTokens, num_entries: int) -> Window:
        """Look up positions and slots of everything that a draft may run; padding gets the root's position.

        Args:
            table: has the slots.
            batch: the roots.
            pending_tokens: tokens of each row that the head runs first, the root included.
            num_entries: entries that the draft may make, the root's included.
        """
        longest, device = pending_tokens.max_count, batch.row_index.device
        offsets = torch.arange(1 - longest, num_entries, device=device)
        if pending_tokens.counts is None:
            positions = batch.root_positions[:, None] + offsets
            return cls(positions, table.slots_at(batch.row_index, positions), longest - 1)
        missing = longest - pending_tokens.counts[:, None]
        moved = offsets + missing  # pending tokens are left-aligned; entries after the root keep their columns
        positions = batch.root_positions[:, None] + moved.clamp(max=0).maximum(offsets)
        slots = table.slots_at(batch.row_index, positions)
        slots[:, :longest] *= moved[:, :longest] <= 0
        return cls(positions, slots, longest - 1)
