"""From tokens to the text that a client gets, and the decision that a text ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specmamba.core import FinishReason
from specmamba.models.tokenizer import Detokenizer


class TextStream:
    """The growing output of one request.

    Tokens are processed one by one, so that a text ends at the same token however many tokens a step brings. Text that
    may be the beginning of a stop string is held back until this is decided.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop_strings: Sequence[str], stop_ids: Collection[int], max_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, tokens: Sequence[int]) -> tuple[int, str, FinishReason | None]:
        """Take new tokens.

        Returns:
            The number of tokens that belong to the output, the text that can be sent now, and why the output ends (None
            if it continues). A stop token counts as output, but its text is not sent, and neither is a stop string.
        """
        ready = ""
        for i, token in enumerate(tokens):
            self._num_tokens += 1
            if token in self._stop_ids:
                return i + 1, ready + self._finish(), "stop"
            text, stopped = self._release(self._detokenizer.push(token))
            ready += text
            if stopped:
                return i + 1, ready, "stop"
            if self._num_tokens >= self._max_tokens:
                text, stopped = self._flush()
                return i + 1, ready + text, "stop" if stopped else "length"
        return len(tokens), ready, None

    def _finish(self) -> str:
        return self._flush()[0]

    def _flush(self) -> tuple[str, bool]:
        text, stopped = self._release(self._detokenizer.flush())
        return (text, True) if stopped else (text + self._held, False)

    def _release(self, new_text: str) -> tuple[str, bool]:
        """Return the text that can be sent now, and whether a stop string was found."""
        self._held += new_text
        found = [at for at in (self._held.find(stop) for stop in self._stop_strings) if at >= 0]
        if found:
            return self._held[: min(found)], True
        keep = _longest_partial_stop(self._held, self._stop_strings)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready, False


def _longest_partial_stop(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is the beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stop_strings), default=1) - 1), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stop_strings):
            return length
    return 0
