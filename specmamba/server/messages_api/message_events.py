"""What POST /v1/messages answers: a message with its blocks, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, RootModel

from specmamba.server.api.responses import LeftOutWhenNone, Usage
from specmamba.server.http.message_errors import MessageError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputTextBlock(BaseModel):
    """What the model says."""

    type: Literal["text"] = "text"
    text: str


class OutputThinking(BaseModel):
    """What the model thought before it answers. It is not signed."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class OutputToolUse(BaseModel):
    """A call that the model asks the client to make."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = OutputTextBlock | OutputThinking | OutputToolUse


class ThinkingTokens(BaseModel):
    """Tokens of the output up to the end of the reasoning."""

    thinking_tokens: int = 0


class MessageUsage(BaseModel):
    """Tokens; those of the input without the ones that were read from the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: ThinkingTokens = ThinkingTokens()

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        """The usage of a chat in these terms."""
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(thinking_tokens=usage.completion_tokens_details.reasoning_tokens),
        )


class MessageAnswer(BaseModel):
    """The answer to POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageStart(BaseModel):
    """The message without content; its usage counts the whole input."""

    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


class Ping(BaseModel):
    """Nothing has happened yet."""

    type: Literal["ping"] = "ping"


class BlockStart(BaseModel):
    """A block begins."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: OutputBlock


class BlockPiece(BaseModel):
    """A piece of a block, in the field for its type."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: Annotated[str | None, LeftOutWhenNone] = None
    thinking: Annotated[str | None, LeftOutWhenNone] = None
    partial_json: Annotated[str | None, LeftOutWhenNone] = None


class BlockDelta(BaseModel):
    """A block goes on."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: BlockPiece


class BlockStop(BaseModel):
    """A block is whole."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnd(BaseModel):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """The message ends; the usage is that of the whole message."""

    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(BaseModel):
    """The stream ends."""

    type: Literal["message_stop"] = "message_stop"


class MessageEvent(
    RootModel[MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError]
):
    """One event of a streamed message."""
