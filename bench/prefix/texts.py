"""Real text in pieces of any length, of which the workloads are made, and the oracle that knows what pieces share.

The **oracle** is a cache of infinite memory that can go on from any position of any text: when a request is submitted,
the longest beginning of its prompt that it shares with the prompt and the whole output of any earlier request (even one
that still runs) costs nothing. At least the last token of its own prompt must be run, as in the engine. No real cache
reaches it: a request that is the first to leave another's path in the middle finds no recurrent state there, the last
output token of a request has never been run, and of two requests that come together the second can share only what the
first has finished.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specmamba.errors import ConfigError
from specmamba.measure.prompts import PromptText, TextTokenizer, bundled_texts, read_texts
from specmamba.train.corpus import default_roots, read_corpus

SPREAD = 4  # lengths that vary go from a SPREADth of the usual one to SPREAD times it
MIN_TOKENS = 64  # of all text: with less, pieces that should differ would be the same
_BYTES = 8  # of a token


@dataclass(frozen=True, slots=True)
class TextSource:
    """Tokens of documents, to cut pieces from."""

    documents: tuple[tuple[int, ...], ...]
    start: tuple[int, ...]  # tokens that the tokenizer puts before every text; none for the demo

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))

    def cut(self, length: int, draw: random.Random) -> tuple[int, ...]:
        """``length`` consecutive tokens from a random place; from several places where a document ends too early."""
        piece: list[int] = []
        weights = [len(document) for document in self.documents]
        while len(piece) < length:
            document = draw.choices(self.documents, weights)[0]
            wanted = length - len(piece)
            first = draw.randrange(max(1, len(document) - wanted + 1))
            piece += document[first : first + wanted]
        return tuple(piece)

    def vary(self, length: int, draw: random.Random) -> tuple[int, ...]:
        """A piece whose length is drawn log-uniformly around ``length``: many short pieces, few long ones."""
        exponent = draw.uniform(-1.0, 1.0)
        return self.cut(max(1, round(length * math.pow(SPREAD, exponent))), draw)


def read_source(prompts: Path | None, tokenizer: TextTokenizer) -> TextSource:
    """The text of a file of prompts; without one, the bundled prompts and the held-out files of the standard library.

    Raises:
        ConfigError: the file cannot be read, or has fewer than ``MIN_TOKENS`` tokens.
        RequestError: a text is not valid Unicode.
    """
    texts = [text.text + (text.continuation or "") for text in _prompts(prompts)]
    if prompts is None:
        texts += _held_out_files()
    start = tuple(tokenizer.encode(""))
    documents = (tuple(tokenizer.encode(text))[len(start) :] for text in texts)
    source = TextSource(tuple(document for document in documents if document), start)
    if source.num_tokens < MIN_TOKENS:
        raise ConfigError(f"--prompts: {prompts}: {source.num_tokens} tokens are too few, give {MIN_TOKENS} or more")
    return source


def _prompts(prompts: Path | None) -> Sequence[PromptText]:
    return bundled_texts() if prompts is None else read_texts(prompts)


def _held_out_files() -> list[str]:
    """None where this Python comes without the sources of its library."""
    try:
        return [document.text for document in read_corpus(default_roots()[:1]).held_out]
    except ConfigError:
        return []


@dataclass(slots=True)
class Oracle:
    """Stores texts, and finds the longest beginning that a new text shares with any of them.

    Texts are sorted token by token: of all texts, one of the two neighbours of a new text shares most with it.
    """

    _texts: list[bytes] = field(default_factory=list)
    num_tokens: int = 0  # in all texts, common beginnings counted once

    def longest(self, tokens: Sequence[int]) -> int:
        """The length of the longest beginning that any stored text shares."""
        return self._shared_with_neighbours(_key(tokens))

    def add(self, tokens: Sequence[int]) -> None:
        """Store a text."""
        key = _key(tokens)
        self.num_tokens += len(tokens) - self._shared_with_neighbours(key)
        self._texts.insert(bisect_left(self._texts, key), key)

    def _shared_with_neighbours(self, key: bytes) -> int:
        place = bisect_left(self._texts, key)
        return max((_common(key, other) for other in self._texts[max(0, place - 1) : place + 1]), default=0)


def oracle_hits(requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Prompt tokens that the oracle spares, by request (prompt, output), in the order of submission."""
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
    """Bytes that sort as the tokens do."""
    import numpy as np  # not at the top: --help must not wait for it

    return (np.array(tokens, dtype=np.int64) + (1 << 62)).astype(">u8").tobytes()


def _common(a: bytes, b: bytes) -> int:
    """The number of tokens that two keys have in common at their beginning."""
    import numpy as np

    length = min(len(a), len(b)) // _BYTES
    differs = np.frombuffer(a, ">u8", length) != np.frombuffer(b, ">u8", length)
    return int(differs.argmax()) if differs.any() else length
