"""Steps that a draft head had no part in, with the target's states, until the head runs their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.shapes import MISSED_AT_ONCE, MISSED_TOKENS


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Those of one row."""

    num_lost: int  # the first ones, whose states are no longer known
    newest_lost: int  # the last of these; any token if there are none
    tokens: list[int]
    states: Tensor  # [k, H], before each of the tokens


@dataclass(slots=True)
class _Run:
    """Steps in a row of the same rows, one token each; or one step, of any number of tokens."""

    first: int  # of its steps, by number
    rows: tuple[int, ...]
    states: Tensor  # [n, B, H], of all steps; with room for more of them if they have one token each
    decided: list[Sequence[Sequence[int]]]  # of each step
    num_tokens: int = 1  # of a step

    def of(self, row: int, begin: int) -> tuple[list[int], Tensor]:
        """The tokens of a row from step ``begin`` on, and the states before them."""
        place, skipped = self.rows.index(row), max(begin - self.first, 0)
        tokens = [token for decided in self.decided[skipped:] for token in decided[place]]
        return tokens, self.states[skipped : skipped + len(tokens), place]


@dataclass(slots=True)
class _Room:
    """For steps of one token whose states lie in the same memory of a CPU every time."""

    run: _Run
    source: Tensor  # [B, 1, H]
    values: memoryview  # its memory
    places: memoryview  # that of the run, step after step
    begin: int  # of the next step in it


@dataclass(slots=True)
class _Lost:
    number: int = 0
    newest: int = 0


class MissedSteps:
    """Owns the newest missed steps of all rows, of ``MISSED_TOKENS`` tokens of a row at the most.

    Rows are looked at when they come back, not in every step. A row that takes part in few of the steps may lose all of
    its tokens to those of others. Steps are lost by runs of ``MISSED_AT_ONCE``.
    """

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque()
        self._num_steps = self._num_tokens = 0  # steps so far; tokens of the kept ones, of the row that has most
        self._began: dict[int, int] = {}  # the first missed step of each row
        self._lost: dict[int, _Lost] = {}  # tokens of each row in steps that are no longer kept
        self._room: _Room | None = None
        self._newest: Tensor | None = None  # states of the newest step

    def __bool__(self) -> bool:
        return bool(self._began)

    def among(self, rows: Sequence[int]) -> list[int]:
        """Return those of the rows that have missed steps."""
        return [row for row in rows if row in self._began]

    def add_again(self, rows: tuple[int, ...], decided: Sequence[Sequence[int]], states: Tensor) -> bool:
        """Add a step like the newest one, in little time; False: there is no room, and nothing was done.

        Args:
            rows: as for ``add``.
            decided: as for ``add``, one token for each row.
            states: what ``add`` got, if it may be the same tensor.
        """
        room = self._room
        if room is None or room.source is not states or room.run.rows != rows:
            return False
        begin = room.begin
        room.begin = end = begin + len(room.values)
        room.places[begin:end] = room.values  # PyTorch and NumPy take longer than a small copy
        room.run.decided.append(decided)
        self._num_steps += 1
        self._num_tokens += 1
        if end == len(room.places):
            self._room = None
        return True

    def add(self, rows: tuple[int, ...], decided: Sequence[Sequence[int]], states: Tensor) -> None:
        """Add a step.

        Args:
            rows: of the request table.
            decided: tokens of each.
            states: [B, n, H], the target's before these tokens; they are copied.
        """
        for row in rows:
            self._began.setdefault(row, self._num_steps)
        number = states.shape[1]
        if number == 1:
            self._add_token(rows, decided, states)
        else:
            self._room = None
            self._end_run()
            self._runs.append(_Run(self._num_steps, rows, states.transpose(0, 1).clone(), [decided], number))
        self._num_steps += 1
        self._num_tokens += number
        while self._num_tokens > MISSED_TOKENS:
            self._lose_oldest()

    def forget(self, row: int) -> None:
        """Drop what a row has missed."""
        self._room = None  # the next step may be the first one that this row misses again
        self._began.pop(row, None)
        self._lost.pop(row, None)
        if not self._began:
            self._runs.clear()
            self._num_tokens = 0

    def take(self, row: int) -> MissedTokens:
        """Return what a row has missed, and forget it."""
        begin, lost = self._began[row], self._lost.get(row, _Lost())
        own = [run.of(row, begin) for run in self._runs if row in run.rows and run.first + len(run.decided) > begin]
        states = _joined([states for _, states in own], 0) if own else torch.zeros(0, 0)
        self.forget(row)
        return MissedTokens(lost.number, lost.newest, [token for tokens, _ in own for token in tokens], states)

    def _add_token(self, rows: tuple[int, ...], decided: Sequence[Sequence[int]], states: Tensor) -> None:
        """Add a step of one token, states [B, 1, H], to the newest run if it has room."""
        run = self._runs[-1] if self._runs else None
        if run is None or run.rows != rows or run.num_tokens > 1 or len(run.decided) == len(run.states):
            self._end_run()
            places = states.new_empty(MISSED_AT_ONCE, len(rows), states.shape[2])
            run = _Run(self._num_steps, rows, places, [])
            self._runs.append(run)
        run.states[len(run.decided)] = states[:, 0]
        run.decided.append(decided)
        is_same, self._newest, self._room = states is self._newest, states, None
        if is_same and states.is_cpu and states.is_contiguous() and len(run.decided) < len(run.states):
            values, begin = _memory(states), len(run.decided)
            self._room = _Room(run, states, values, _memory(run.states), begin * len(values))

    def _end_run(self) -> None:
        """Give back the room that the newest run has left, before another one begins."""
        run = self._runs[-1] if self._runs else None
        if run is not None and run.num_tokens == 1 and len(run.decided) < len(run.states):
            run.states = run.states[: len(run.decided)].clone()

    def _lose_oldest(self) -> None:
        run = self._runs.popleft()
        self._num_tokens -= run.num_tokens * len(run.decided)
        for place, row in enumerate(run.rows):
            begin = self._began.get(row, self._num_steps + 1) - run.first
            if tokens := [token for decided in run.decided[max(begin, 0) :] for token in decided[place]]:
                lost = self._lost.setdefault(row, _Lost())
                lost.number, lost.newest = lost.number + len(tokens), tokens[-1]


def _memory(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on a CPU, byte by byte."""
    return x.detach().view(torch.uint8).numpy().reshape(-1).data


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate parts; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
