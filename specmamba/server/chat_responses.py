"""What POST /v1/chat/completions answers, in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from specmamba.server.responses import LeftOutWhenNone, TokenPiece, Usage

ChatEndReason = Literal["stop", "length", "tool_calls"]


class FunctionCall(BaseModel):
    """The function to call, and what to call it with."""

    name: str
    arguments: Annotated[str, Field(description="a JSON object, written out; cut off where the answer is")]


class ToolCall(BaseModel):
    """A call that the model asks the client to make."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, Field(description="null where there are tool calls and nothing else")]
    refusal: None = None
    tool_calls: Annotated[list[ToolCall] | None, LeftOutWhenNone] = None


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a place. Natural logarithms; -9999 stands for impossible."""

    token: str
    bytes: list[int] | None
    logprob: float


class ChatTokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of an answer, calls included."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer of the model."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatEndReason | None
    tokens: Annotated[list[TokenPiece] | None, LeftOutWhenNone] = None


class ChatCompletion(BaseModel):
    """The answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class FunctionCallDelta(BaseModel):
    """What a chunk adds to a call: the name first, then pieces of the arguments."""

    name: Annotated[str | None, LeftOutWhenNone] = None
    arguments: str


class ToolCallDelta(BaseModel):
    """The place of a call among those of its message, and what a chunk adds to it."""

    index: int
    id: Annotated[str | None, LeftOutWhenNone] = None
    type: Annotated[Literal["function"] | None, LeftOutWhenNone] = None
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    """What a chunk adds to the message."""

    role: Annotated[Literal["assistant"] | None, LeftOutWhenNone] = None
    content: Annotated[str | None, LeftOutWhenNone] = None
    tool_calls: Annotated[list[ToolCallDelta] | None, LeftOutWhenNone] = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatEndReason | None = None
    tokens: Annotated[list[TokenPiece] | None, LeftOutWhenNone] = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
