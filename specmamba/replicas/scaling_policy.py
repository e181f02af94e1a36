"""How many replicas there should be: a function of the load, of time, and of what the load was before.

More are wanted when the queued tokens of each have been above a target for a time, fewer when one less would have had
clearly less than the target for a longer time. Between the two nothing changes, so that the number does not swing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CALM_SHARE = 0.5  # of the target: what those that stay may have at the most when one leaves


@dataclass(frozen=True, slots=True)
class Load:
    """What replicas have to do."""

    num_serving: int  # replicas that take requests
    num_starting: int  # that will
    queued_tokens: int  # of all requests

    @property
    def num_replicas(self) -> int:
        """Those that serve, or will."""
        return self.num_serving + self.num_starting


@dataclass(frozen=True, slots=True)
class Marks:
    """Since when the load has been as it is, in seconds; None: it is not so."""

    above: float | None = None
    below: float | None = None


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Decides on the number of replicas. Has no state: what it must remember it returns."""

    min_replicas: int
    max_replicas: int
    target_tokens: int  # queued, of each replica
    grow_delay_s: float
    shrink_delay_s: float

    def decide(self, load: Load, now: float, marks: Marks) -> tuple[int, Marks]:
        """Decide how many replicas there should be now.

        A replica that starts cannot help yet, so that no further one is wanted until it serves. As many are wanted as
        have the target each; they leave one at a time.

        Args:
            load: what there is to do.
            now: seconds of any clock that does not go back.
            marks: what the call before has returned; ``Marks()`` at first.

        Returns:
            The number, and marks for the next call.
        """
        num = load.num_replicas
        if num < self.min_replicas:
            return self.min_replicas, Marks()
        if num > self.max_replicas:
            return self.max_replicas, Marks()
        above = self._since(marks.above, self._is_above(load), now)
        below = self._since(marks.below, self._is_calm(load), now)
        if above is not None and now - above >= self.grow_delay_s:
            wanted = math.ceil(load.queued_tokens / self.target_tokens)
            return min(max(wanted, num + 1), self.max_replicas), Marks()
        if below is not None and now - below >= self.shrink_delay_s:
            return num - 1, Marks()
        return num, Marks(above, below)

    def is_at_rest(self, load: Load) -> bool:
        """Whether nothing will change as long as the load does not."""
        is_within = self.min_replicas <= load.num_replicas <= self.max_replicas
        return is_within and not load.num_starting and not self._is_above(load) and not self._is_calm(load)

    def _is_above(self, load: Load) -> bool:
        can_grow = load.num_starting == 0 and load.num_replicas < self.max_replicas
        return can_grow and load.queued_tokens > self.target_tokens * load.num_serving

    def _is_calm(self, load: Load) -> bool:
        others = load.num_replicas - 1
        return others >= self.min_replicas and load.queued_tokens <= CALM_SHARE * self.target_tokens * others

    @staticmethod
    def _since(mark: float | None, holds: bool, now: float) -> float | None:
        if not holds:
            return None
        return now if mark is None else mark
