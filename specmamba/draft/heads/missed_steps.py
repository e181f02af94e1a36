"""Steps that a draft head had no part in, with the target's states, until the head runs their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.shapes import MISSED_TOKENS

# rows of the request table, tokens that were decided for each, and the target's states [B, n, F] before these
MissedStep = tuple[tuple[int, ...], Sequence[Sequence[int]], Tensor]


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Those of one row that are still known, the newest ones."""

    num_lost: int  # tokens before them
    tokens: list[int]
    states: Tensor  # [k, F], before each token


class MissedSteps:
    """Owns the newest ``MISSED_TOKENS`` missed steps. Rows are looked at when they come back, not in every step."""

    def __init__(self) -> None:
        self._steps: deque[MissedStep] = deque()
        self._num_steps = 0  # so far
        self._began: dict[int, int] = {}  # the first missed step of each row
        self._num_lost: dict[int, int] = {}  # tokens of each row in steps that are no longer kept
        self._newest_rows: tuple[int, ...] = ()  # all have begun

    def __bool__(self) -> bool:
        return bool(self._began)

    def among(self, rows: Sequence[int]) -> list[int]:
        """Return those of the rows that have missed steps."""
        return [row for row in rows if row in self._began]

    def add(self, step: MissedStep) -> None:
        """Add a step, whose values are kept and must not change."""
        rows = step[0]
        if rows != self._newest_rows:
            for row in rows:
                self._began.setdefault(row, self._num_steps)
            self._newest_rows = rows
        if len(self._steps) == MISSED_TOKENS:
            self._lose(self._steps.popleft(), self._num_steps - MISSED_TOKENS)
        self._steps.append(step)
        self._num_steps += 1

    def forget(self, row: int) -> None:
        """Drop what a row has missed."""
        self._newest_rows = ()
        self._began.pop(row, None)
        self._num_lost.pop(row, None)
        if not self._began:
            self._steps.clear()

    def take(self, rows: Sequence[int]) -> list[MissedTokens]:
        """Return what these rows have missed, and forget it."""
        oldest = self._num_steps - len(self._steps)
        states = torch.cat([states.flatten(0, 1) for _, _, states in self._steps])
        found = []
        for row in rows:
            tokens, places = self._tokens(row, self._began[row] - oldest)
            index = torch.tensor(places, device=states.device)
            found.append(MissedTokens(self._num_lost.get(row, 0), tokens, states[index]))
        for row in rows:
            self.forget(row)
        return found

    def _lose(self, step: MissedStep, number: int) -> None:
        rows, decided, _ = step
        for row, tokens in zip(rows, decided, strict=True):
            if self._began.get(row, number + 1) <= number:
                self._num_lost[row] = self._num_lost.get(row, 0) + len(tokens)

    def _tokens(self, row: int, begin: int) -> tuple[list[int], list[int]]:
        """The tokens of a row from a kept step on, and the places of the states before them."""
        tokens: list[int] = []
        places: list[int] = []
        end = 0
        for number, (rows, decided, states) in enumerate(self._steps):
            start, end = end, end + states.shape[0] * states.shape[1]
            if number >= begin and row in rows:
                place = rows.index(row)
                tokens += decided[place]
                start += place * states.shape[1]
                places += range(start, start + len(decided[place]))
        return tokens, places
