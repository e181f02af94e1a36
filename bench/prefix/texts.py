"""Real text in pieces of any length: what the workloads of the prefix benchmark are made of."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specmamba.errors import ConfigError
from specmamba.measure.prompts import PromptText, TextTokenizer, bundled_texts, read_texts
from specmamba.train.corpus import default_roots, read_corpus

SPREAD = 4  # lengths that vary go from a SPREADth of the usual one to SPREAD times it
MIN_TOKENS = 64  # of all text: with less, pieces that should differ would be the same


@dataclass(frozen=True, slots=True)
class TextSource:
    """Documents as tokens, to cut pieces from."""

    documents: tuple[tuple[int, ...], ...]
    start: tuple[int, ...]  # what the tokenizer puts before every text; none for the demo

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
        """A piece whose length is drawn log-uniformly around ``length``: many short ones, few long ones."""
        exponent = draw.uniform(-1.0, 1.0)
        return self.cut(max(1, round(length * math.pow(SPREAD, exponent))), draw)


def read_source(prompts: Path | None, tokenizer: TextTokenizer) -> TextSource:
    """The text of a file of prompts; without one, the bundled prompts and the held-out files of the standard library.

    Raises:
        ConfigError: the file cannot be read, or there is next to no text.
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
