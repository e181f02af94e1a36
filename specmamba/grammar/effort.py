"""What a grammar may cost the engine, which everybody waits for while one of its masks is made."""

from __future__ import annotations

from specmamba.errors import GrammarError

SLOW_SECONDS, MAX_SLOW = 0.1, 2  # of one mask, or of taking one token
FREE_SECONDS = 0.02  # of each, so that the length of an answer does not matter
MAX_SECONDS = 2.0  # beyond those, of a whole request
_LARGE_VOCABULARY = 1 << 15


def scale_of(vocab_size: int) -> float:
    """How much longer a mask may take than with a small vocabulary."""
    return max(1.0, vocab_size / _LARGE_VOCABULARY)


class Effort:
    """The processor time of one request's masks and tokens, in seconds."""

    def __init__(self, vocab_size: int) -> None:
        self._scale = scale_of(vocab_size)
        self._num_slow = 0
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one of them.

        Raises:
            GrammarError: it is too much for one request ("grammar_too_complex").
        """
        self._num_slow += seconds > SLOW_SECONDS * self._scale
        self._seconds += max(0.0, seconds - FREE_SECONDS * self._scale)
        if self._num_slow >= MAX_SLOW or self._seconds > MAX_SECONDS:
            message = "the grammar is too complex: finding out which tokens may follow takes too long here"
            raise GrammarError(message, "grammar_too_complex")
