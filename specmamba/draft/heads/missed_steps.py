"""Steps that a draft head had no part in, with the target's states, until the head runs their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

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


@dataclass(frozen=True, slots=True)
class _Run:
    """Steps in a row of the same rows, one token each; or one step, of any number of tokens."""

    first: int  # of its steps, by number
    rows: tuple[int, ...]
    decided: Sequence[Sequence[Sequence[int]]]  # of each step
    states: Tensor  # [B, n, H], of all steps

    def of(self, row: int, begin: int) -> tuple[list[int], Tensor]:
        """The tokens of a row from step ``begin`` on, and the states before them."""
        place, skipped = self.rows.index(row), max(begin - self.first, 0)
        tokens = [token for decided in self.decided[skipped:] for token in decided[place]]
        return tokens, self.states[place, skipped : skipped + len(tokens)]


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
        self._runs: list[_Run] | None = None  # of all steps; None: these have changed since

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
        self._runs = None
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
            self._runs, self._num_tokens = None, 0

    def take(self, row: int) -> MissedTokens:
        """Return what a row has missed, and forget it."""
        begin, lost = self._began[row], self._lost.get(row, _Lost())
        if self._runs is None:  # the other rows of a batch come back at the same time
            self._runs = list(self._runs_of_steps())
        own = [run.of(row, begin) for run in self._runs if row in run.rows and run.first + len(run.decided) > begin]
        self.forget(row)
        states = _joined([states for _, states in own], 0) if own else torch.zeros(0, 0)
        return MissedTokens(lost.number, lost.newest, [token for tokens, _ in own for token in tokens], states)

    def _runs_of_steps(self) -> Iterator[_Run]:
        first = self._num_steps - len(self._steps)
        numbered = enumerate(self._steps, first)
        for _, group in groupby(numbered, lambda x: (x[1][0], -1 if x[1][2].shape[1] == 1 else x[0])):
            steps = [step for _, step in group]
            states = _joined([states for _, _, states in steps], 1)
            yield _Run(first, steps[0][0], [decided for _, decided, _ in steps], states)
            first += len(steps)

    def _lose_oldest(self) -> None:
        number = self._num_steps - len(self._steps)
        rows, decided, states = self._steps.popleft()
        self._num_tokens -= states.shape[1]
        for row, tokens in zip(rows, decided, strict=True):
            if self._began.get(row, number + 1) <= number:
                lost = self._lost.setdefault(row, _Lost())
                lost.number, lost.newest = lost.number + len(tokens), tokens[-1]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate parts; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
