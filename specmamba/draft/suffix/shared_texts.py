"""Texts of requests that may be drafted from each other, in a bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count

from specmamba.draft.drafter import SharedText
from specmamba.kernels import suffix_automaton
from specmamba.kernels.suffix_automaton import ROOT, SuffixAutomaton, Tokens

SHARE = 4  # of the memory is the most that one automaton gets, so the oldest texts go part by part
LARGEST = 16 << 30  # bytes of one automaton at the most: its states have 32-bit numbers
OWN_BYTES = 2048  # of an automaton, besides what it counts
MOST_TOKENS = 4096  # of a text that are added in one call: all requests wait for it


@dataclass(eq=False)
class _Texts:
    """Texts of one key, up to a share of the memory. They are dropped together."""

    key: Hashable
    number: int
    automaton: SuffixAutomaton

    @property
    def num_bytes(self) -> int:
        return self.automaton.num_bytes + OWN_BYTES


class SharedTexts:
    """Owns the texts of all keys. What has been unused for the longest time is dropped. Not thread-safe.

    A key is what separates cached prefixes: a tenant and a salt. Texts of different keys are never in one automaton.
    """

    def __init__(self, max_bytes: int, max_match: int) -> None:
        """Start without texts; ``max_match``: tokens of the longest context."""
        self._max_bytes, self._max_match = max_bytes, max_match
        self._numbers = count()  # each is used once, so a text notices that its automaton was dropped
        self._of_key: dict[Hashable, list[_Texts]] = {}  # the newest last
        self._by_use: OrderedDict[_Texts, int] = OrderedDict()  # and their bytes, the latest use last
        self.num_bytes = 0
        self.num_dropped = 0  # automata so far, for want of memory

    def of(self, key: Hashable) -> list[SuffixAutomaton]:
        """Return the automata of a key, the newest first."""
        found = self._of_key.get(key, ())
        for texts in found:
            self._by_use.move_to_end(texts)
        return [texts.automaton for texts in reversed(found)]

    def extend(self, shared: SharedText, text: Tokens) -> None:
        """Add the next tokens of a text, at most ``MOST_TOKENS``.

        Args:
            shared: the text's, which is changed.
            text: [n] int32, all of it.
        """
        if shared.num_tokens < len(text):
            self._extend(shared, text[: shared.num_tokens + MOST_TOKENS])

    def end(self, shared: SharedText, text: Tokens) -> None:
        """Add the last tokens of a text, at most ``MOST_TOKENS``; those that are missing before them are left out."""
        first = len(text) - MOST_TOKENS
        if shared.num_tokens < first:
            shared.skip_to(first)
        self.extend(shared, text)

    def forget(self) -> None:
        """Drop all texts."""
        while self._by_use:
            self._drop(next(iter(self._by_use)))

    def _extend(self, shared: SharedText, text: Tokens) -> None:
        texts, start = self._newest(shared.key), shared.num_tokens
        if shared.part != texts.number:  # it goes on there, and begins with as much as a context may have
            shared.part, shared.place, start = texts.number, ROOT, max(0, start - self._max_match)
        shared.place = texts.automaton.extend(shared.place, text[start:])
        shared.num_tokens = len(text)
        self.num_bytes += texts.num_bytes - self._by_use[texts]
        self._by_use[texts] = texts.num_bytes
        self._by_use.move_to_end(texts)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._by_use)))
            self.num_dropped += 1

    def _newest(self, key: Hashable) -> _Texts:
        """Return the automaton of a key that texts are added to."""
        of_key = self._of_key.setdefault(key, [])
        if not of_key or of_key[-1].num_bytes >= min(self._max_bytes // SHARE, LARGEST):
            texts = _Texts(key, next(self._numbers), suffix_automaton.new_automaton(self._max_match))
            of_key.append(texts)
            self._by_use[texts] = texts.num_bytes
            self.num_bytes += texts.num_bytes
        return of_key[-1]

    def _drop(self, texts: _Texts) -> None:
        self.num_bytes -= self._by_use.pop(texts)
        of_key = self._of_key[texts.key]
        of_key.remove(texts)
        if not of_key:
            del self._of_key[texts.key]
