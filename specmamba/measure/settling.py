"""How soon a server is at its steady speed after the load has changed, from the arrivals of its streams.

The engine's steps are not visible to clients, so they are put together from arrivals. A step gives each stream one
piece, so pieces are counted: the first one of an answer belongs to the newest step of all streams, and each one after
it to the next step. The order in which a busy client reads its streams does not matter then. A step is *full* if every
client got a piece of it in the middle of an answer. Only full steps are judged: the others wait for prompts, or run
with fewer requests than the load has.

The steady speed is that of the second half of the full steps. Windows of consecutive full steps slide over all of them,
and the median over rounds of their speed over the steady one is taken: texts of one round are easier to draft here than
there. The load has settled with the first window from which on no window is slower than the tolerance allows; the first
window that is fast enough is also told, because noise of texts and machine can make one slow long after. Being faster
does not count as unsettled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that a client has received at once: of one step, or of a few when it or the server was late."""

    at: float
    stream: int
    tokens_by_step: tuple[int, ...]
    num_drafted: int
    is_first: bool  # of an answer


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, as clients see it."""

    at: float  # its last arrival
    tokens: int
    is_full: bool


@dataclass(frozen=True, slots=True)
class FullStep:
    """What a full step took and gave."""

    seconds: float
    tokens: int


def tokens_by_step(depths: Iterable[int]) -> tuple[int, ...]:
    """Split tokens by their steps. ``depths``: in the drafts; each step ends with a token that was not drafted: 0.

    The last step of an answer may lack that token, because the answer was long enough without it.
    """
    counts, current = [], 0
    for depth in depths:
        current += 1
        if depth == 0:
            counts.append(current)
            current = 0
    return (*counts, current) if current else tuple(counts)


def steps_of(arrivals: Iterable[Arrival], num_clients: int) -> list[Step]:
    """Put the steps of the engine together from what all streams received."""
    steps: list[_OpenStep] = []
    places: dict[int, int] = {}  # the newest step of each stream
    for arrival in sorted(arrivals, key=lambda each: each.at):
        for number, tokens in enumerate(arrival.tokens_by_step):
            begins = arrival.is_first and number == 0
            after_own = places.get(arrival.stream, -1) + 1
            place = max(after_own, len(steps) - 1) if begins else after_own
            if place == len(steps):
                steps.append(_OpenStep())
            steps[place].add(arrival.at, tokens, begins=begins)
            places[arrival.stream] = place
    return [Step(step.at, step.tokens, is_full=step.num_going_on == num_clients) for step in steps]


@dataclass
class _OpenStep:
    """A step of which more may arrive."""

    at: float = 0.0
    tokens: int = 0
    num_going_on: int = 0  # streams in the middle of an answer

    def add(self, at: float, tokens: int, *, begins: bool) -> None:
        self.at = max(self.at, at)
        self.tokens += tokens
        self.num_going_on += not begins


def full_steps(steps: Sequence[Step]) -> list[FullStep]:
    """The full steps, each with the time since the step before it."""
    return [FullStep(max(0.0, step.at - before.at), step.tokens) for before, step in pairwise(steps) if step.is_full]


def speed_of(steps: Sequence[FullStep]) -> float:
    """Tokens per second."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.tokens for step in steps) / seconds if seconds else math.inf


def window_speeds(steps: Sequence[FullStep], size: int) -> list[float]:
    """The speed of every window of ``size`` steps, over the steady speed. Empty: too few steps for two windows."""
    if len(steps) < 2 * size:
        return []
    steady = speed_of(steps[len(steps) // 2 :])
    tokens = [0, *accumulate(step.tokens for step in steps)]
    times = [0.0, *accumulate(step.seconds for step in steps)]
    ends = range(size, len(steps) + 1)
    return [(tokens[i] - tokens[i - size]) / max(times[i] - times[i - size], 1e-9) / steady for i in ends]


def median_curve(rounds: Iterable[Sequence[FullStep]], size: int) -> list[float]:
    """The median over rounds of ``window_speeds``, as far as the shortest round goes."""
    curves = [window_speeds(steps, size) for steps in rounds]
    return [statistics.median(values) for values in zip(*curves, strict=False)]


def reached_after(curve: Sequence[float], size: int, tolerance: float) -> int | None:
    """Steps to the end of the first window that is fast enough; None: there is none."""
    return next((size + i for i, speed in enumerate(curve) if speed >= 1 - tolerance), None)


def settled_after(curve: Sequence[float], size: int, tolerance: float) -> int | None:
    """Steps to the end of the first window from which on all are fast enough; None: the last one is not, or no window.

    ``size``, the length of a window, is the least that can be found.
    """
    slow = [i for i, speed in enumerate(curve) if speed < 1 - tolerance]
    first_good = slow[-1] + 1 if slow else 0
    return size + first_good if first_good < len(curve) else None
