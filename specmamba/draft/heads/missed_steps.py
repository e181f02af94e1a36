"""Steps that a draft head had no part in, with the target's states, until the head runs their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.shapes import MISSED_TOKENS

# rows of the request table, tokens that were decided for each, and the target's states [B, n, H] before these
MissedStep = tuple[tuple[int, ...], Sequence[Sequence[int]], Tensor]


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Those of one row."""

    num_lost: int  # the first ones, whose states are no longer known
    newest_lost: int  # the last of these; any token if there are none
    tokens: list[int]
    states: Tensor  # [k, H], before each of the tokens


@dataclass(slots=True)
class _Lost:
    number: int = 0
    newest: int = 0


class MissedSteps:
    """Owns the newest missed steps of all rows, of ``MISSED_TOKENS`` tokens of a row at the most.

    Rows are looked at when they come back, not in every step. A row that takes part in few of the steps may lose all of
    its tokens to those of others.
    """

    def __init__(self) -> None:
        self._steps: deque[MissedStep] = deque()
        self._num_steps = self._num_tokens = 0  # steps so far; tokens of the kept ones, of the row that has most
        self._began: dict[int, int] = {}  # the first missed step of each row
        self._lost: dict[int, _Lost] = {}  # tokens of each row in steps that are no longer kept
        self._newest_rows: tuple[int, ...] = ()  # all have begun

    def __bool__(self) -> bool:
        return bool(self._began)

    def among(self, rows: Sequence[int]) -> list[int]:
        """Return those of the rows that have missed steps."""
        return [row for row in rows if row in self._began]

    def add(self, step: MissedStep) -> None:
        """Add a step, whose values are kept and must not change."""
        rows, _, states = step
        if rows != self._newest_rows:
            for row in rows:
                self._began.setdefault(row, self._num_steps)
            self._newest_rows = rows
        self._steps.append(step)
        self._num_steps += 1
        self._num_tokens += states.shape[1]
        while self._num_tokens > MISSED_TOKENS:
            self._lose_oldest()

    def forget(self, row: int) -> None:
        """Drop what a row has missed."""
        self._newest_rows = ()
        self._began.pop(row, None)
        self._lost.pop(row, None)
        if not self._began:
            self._steps.clear()
            self._num_tokens = 0

    def take(self, row: int) -> MissedTokens:
        """Return what a row has missed, and forget it."""
        begin, lost = self._began[row], self._lost.get(row, _Lost())
        oldest, tokens, parts = self._num_steps - len(self._steps), list[int](), list[Tensor]()
        for number, (rows, decided, states) in enumerate(self._steps, oldest):
            if number >= begin and row in rows:
                place = rows.index(row)
                tokens += decided[place]
                parts.append(states[place, : len(decided[place])])
        self.forget(row)
        return MissedTokens(lost.number, lost.newest, tokens, torch.cat(parts) if parts else torch.zeros(0, 0))

    def _lose_oldest(self) -> None:
        number = self._num_steps - len(self._steps)
        rows, decided, states = self._steps.popleft()
        self._num_tokens -= states.shape[1]
        for row, tokens in zip(rows, decided, strict=True):
            if self._began.get(row, number + 1) <= number:
                lost = self._lost.setdefault(row, _Lost())
                lost.number, lost.newest = lost.number + len(tokens), tokens[-1]
