"""Writing the chunks of a stream out, most of which say the same around a piece of text."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel
from pydantic_core import to_json

Chunk = BaseModel | str


class ChunkWriter:
    """Chunks of one call as JSON.

    A text stands for the chunk that ``text_chunk`` makes of it and the index of its choice. What is around it is
    written once for each choice; building a model for every piece would take most of the event loop's time.
    """

    def __init__(self, text_chunk: Callable[[int, str], BaseModel], *, with_usage: bool) -> None:
        """``with_usage``: chunks have a field "usage", null where there is none yet."""
        self._text_chunk = text_chunk
        # With include_usage OpenAI's chunks carry "usage": null, without it they have no such field.
        self._without = None if with_usage else {"usage"}
        self._around: dict[int, tuple[str, str]] = {}

    def write(self, index: int, chunk: Chunk) -> str:
        """A chunk of the choice ``index``."""
        if not isinstance(chunk, str):
            return chunk.model_dump_json(exclude=self._without)
        if index not in self._around:
            self._around[index] = self._split(index)
        before, after = self._around[index]
        return f"{before}{to_json(chunk).decode()}{after}"

    def full(self, index: int, chunk: Chunk) -> BaseModel:
        """A chunk as a model, text or not."""
        return self._text_chunk(index, chunk) if isinstance(chunk, str) else chunk

    def _split(self, index: int) -> tuple[str, str]:
        empty = self._text_chunk(index, "").model_dump_json(exclude=self._without)
        before, _, after = empty.rpartition('""')  # no other text comes after it
        return before, after
