"""Chunks that are written from a template are equal, byte for byte, to the JSON of their models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import BaseModel

from specmamba.server.api.answers import ChunkWriter
from specmamba.server.api.responses import ChatChunkChoice, ChatCompletionChunk, ChatDelta, Completion, CompletionChoice

TEXTS = [
    "",
    "a",
    '"',
    '""',
    "\\",
    "</script>\n\r\t\b\f",
    "".join(map(chr, range(0x20))),
    "\x7f\u2028\ufeff",
    "é世🙂\U0010ffff",
]
NAMES = ["m", "", '""', '"text":""', '\\"', "é"]


def completion(name: str) -> Callable[[int, str], BaseModel]:
    def chunk(index: int, text: str) -> Completion:
        choice = CompletionChoice(index=index, text=text, finish_reason=None)
        return Completion(id=f"cmpl-{name}", created=7, model=name, choices=[choice])

    return chunk


def chat(name: str) -> Callable[[int, str], BaseModel]:
    def chunk(index: int, text: str) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=ChatDelta(content=text))
        return ChatCompletionChunk(id=f"chat-{name}", created=7, model=name, choices=[choice])

    return chunk


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("kind", [completion, chat])
def test_a_text_is_written_as_its_model_is(
    kind: Callable[[str], Callable[[int, str], BaseModel]], with_usage: bool
) -> None:
    for name in NAMES:
        text_chunk = kind(name)
        writer = ChunkWriter(text_chunk, with_usage=with_usage)
        for index in (0, 12, 0):
            for text in TEXTS:
                whole = text_chunk(index, text)
                expected = whole.model_dump_json(exclude=None if with_usage else {"usage"})
                assert writer.write(index, text) == writer.write(index, whole) == expected
                assert ('"usage":null' in expected) is with_usage
                assert writer.full(index, text) == writer.full(index, whole) == whole
