"""Steps that a draft head has no part in: their newest tokens and the target's states, until the head runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.shapes import MISSED_TOKENS, missed_room
from specmamba.core import Batch, Verdict
from specmamba.draft.drafter import NoDrafter


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Those of one row."""

    num_lost: int  # the first ones, whose states are no longer known
    tokens: list[int]  # the newest ones, at least one
    states: Tensor  # [k, H], before each of the tokens


class MissedSteps(NoDrafter):
    """Stands in for a head in steps that it skips, and owns the newest ``MISSED_TOKENS`` tokens of each row.

    Such a step writes them itself, by position, on the device: a captured step costs the host nothing for it.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        combine: Callable[[Tensor], Tensor],
    ) -> None:
        """Allocate room for all rows.

        Args:
            shape: rows of the request table, row 0 included; nodes of a step at the most; H.
            dtype: of states.
            device: of the pools.
            combine: makes states [..., H] of the target's features [..., F].
        """
        num_rows, max_nodes, width = shape
        room = missed_room(max_nodes)
        self._last_column, self._combine = room - 1, combine
        self._tokens = torch.zeros(num_rows, room, dtype=torch.int64, device=device)  # by position, modulo the room
        self._states = torch.zeros(num_rows, room, width, dtype=dtype, device=device)  # before the token there
        self._roots = torch.zeros(num_rows, dtype=torch.int64, device=device)  # positions, behind the newest step
        self._complete: set[int] = set()  # rows that surely miss nothing

    def may_follow(self, batch_size: int) -> bool:
        return False

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Keep the decided tokens. Columns after a row's last one may hold anything until later steps write them."""
        number = features.shape[1]
        first = batch.root_positions[:, None] + 1
        columns = (first + torch.arange(number, device=first.device)) & self._last_column
        rows = batch.row_index[:, None]
        self._tokens[rows, columns] = verdict.path_tokens[:, :number]
        self._states[rows, columns] = self._combine(verdict.on_path(features))
        self._roots[batch.row_index] = batch.root_positions + (verdict.num_accepted + 1)

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        self._complete.difference_update(rows)

    def forget(self, row: int) -> None:
        """Start a request in this row, or start it over."""
        self._roots[row].fill_(0)
        self._complete.add(row)

    def among(self, rows: Sequence[int], roots: Sequence[int]) -> list[tuple[int, int]]:
        """Return those of some rows that have missed tokens, and how many; waits for the device where some may.

        Args:
            rows: of the request table.
            roots: by row, positions of the roots behind the newest steps that were not skipped.
        """
        if self._complete.issuperset(rows):
            return []
        rows = [row for row in rows if row not in self._complete]
        found = self._roots[torch.tensor(rows, device=self._roots.device)].tolist()
        self._complete.update(rows)
        return [(row, root - roots[row]) for row, root in zip(rows, found, strict=True) if root > roots[row]]

    def take(self, row: int, root: int, number: int) -> MissedTokens:
        """Return what a row has missed: ``number`` tokens, behind a root at this position."""
        kept = min(number, MISSED_TOKENS)
        columns = torch.arange(root + number - kept + 1, root + number + 1) & self._last_column
        columns = columns.to(self._tokens.device)
        return MissedTokens(number - kept, self._tokens[row, columns].tolist(), self._states[row, columns])
