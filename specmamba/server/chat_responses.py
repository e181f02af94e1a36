"""What POST /v1/chat/completions answers, in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel

from specmamba.server.responses import EndReason, LeftOutWhenNone, Usage


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer of the model."""

    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: EndReason | None


class ChatCompletion(BaseModel):
    """The answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatDelta(BaseModel):
    """What a chunk adds to the message."""

    role: Annotated[Literal["assistant"] | None, LeftOutWhenNone] = None
    content: Annotated[str | None, LeftOutWhenNone] = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: EndReason | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
