"""What a cache could spare at the best, if it had no bounds and kept everything.

The **oracle** is a cache of infinite memory that can go on from any position of any text: when a request is submitted,
the longest beginning of its prompt that it shares with any request submitted before it (that one's prompt and its whole
output, even if it is still being computed) costs nothing. Of its own prompt at least the last token remains to be run,
as everywhere here. No real cache reaches it: a request that is the first to leave another's path in the middle finds no
recurrent state there, the last output token of a request has never been run, and of two requests that come together the
second one can share only what the first one has finished.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

_BYTES = 8  # of a token


@dataclass(slots=True)
class Oracle:
    """Remembers texts, and finds the longest beginning that a new one shares with any of them.

    Texts are kept in order, token by token: of all texts a new one shares most with one of its two neighbours there.
    """

    _texts: list[bytes] = field(default_factory=list)
    num_tokens: int = 0  # in all texts, common beginnings counted once

    def longest(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest beginning that some remembered text shares."""
        return self._shared_with_neighbours(_key(tokens))

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text."""
        key = _key(tokens)
        self.num_tokens += len(tokens) - self._shared_with_neighbours(key)
        self._texts.insert(bisect_left(self._texts, key), key)

    def _shared_with_neighbours(self, key: bytes) -> int:
        place = bisect_left(self._texts, key)
        return max((_common(key, other) for other in self._texts[max(0, place - 1) : place + 1]), default=0)


def oracle_hits(requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Prompt tokens that cost the oracle nothing, of each request (prompt, output) in the order of submission."""
    oracle, hits = Oracle(), []
    for prompt, output in requests:
        hits.append(oracle.longest(prompt[:-1]))
        oracle.add([*prompt, *output])
    return hits


def distinct_tokens(texts: Iterable[Sequence[int]]) -> int:
    """Tokens of all texts, common beginnings counted once."""
    oracle = Oracle()
    for text in texts:
        oracle.add(text)
    return oracle.num_tokens


def _key(tokens: Sequence[int]) -> bytes:
    """Bytes that are ordered as the tokens are."""
    return (np.array(tokens, dtype=np.int64) + (1 << 62)).astype(">u8").tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Tokens at the beginning of both."""
    length = min(len(a), len(b)) // _BYTES
    differs = np.frombuffer(a, ">u8", length) != np.frombuffer(b, ">u8", length)
    return int(differs.argmax()) if differs.any() else length
