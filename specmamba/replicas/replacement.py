"""Which replica is started where none is left: a bounded number of attempts in a row, with growing waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MAX_ATTEMPTS = 6  # in a row
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0  # before an attempt; they double


class Replacement:
    """Attempts to start another replica. They are forgotten when one serves."""

    def __init__(self) -> None:
        self._tries: Counter[int] = Counter()  # of each replica
        self._due: float | None = None  # when the next attempt is made, if one is planned

    @property
    def num_attempts(self) -> int:
        """Those that were made in a row."""
        return self._tries.total()

    @property
    def is_given_up(self) -> bool:
        """Whether no further one is made."""
        return self.num_attempts >= MAX_ATTEMPTS

    def forget(self) -> None:
        """Begin anew: a replica serves."""
        self._tries.clear()
        self._due = None

    def choose(self, free: Sequence[int], now: float) -> int | None:
        """Choose the replica to start now; None: it is too early.

        Args:
            free: those that may be started, the best first; of those with the fewest attempts the first is taken.
            now: seconds of any clock that does not go back.
        """
        if self._due is None:
            self._due = now + min(FIRST_WAIT_S * 2**self.num_attempts, LONGEST_WAIT_S)
        if now < self._due:
            return None
        self._due = None
        index = min(free, key=lambda one: self._tries[one])
        self._tries[index] += 1
        return index
