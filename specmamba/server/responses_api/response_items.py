"""What POST /v1/responses answers: a response with its items, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from specmamba.server.api.responses import LeftOutWhenNone, Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(BaseModel):
    """The text of a reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    """What the model says."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(BaseModel):
    """What the model thought before it answers."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class OutputCall(BaseModel):
    """A call that the model asks the client to make."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: Annotated[str, Field(description="a JSON object, written out; cut off where the answer is")]


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(BaseModel):
    """Where the tokens of the input came from."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """Tokens of the output up to the end of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        """The usage of a chat in these terms."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


class ResponseFailure(BaseModel):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is cut off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """The answer to POST /v1/responses, with the fields of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    previous_response_id: None = None
    background: Literal[False] = False
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(BaseModel):
    """The state of the response: at the beginning, and whole at the end."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    sequence_number: int
    response: ResponseObject


class ItemEvent(BaseModel):
    """An item begins or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(BaseModel):
    """The content of an item begins or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextEvent(BaseModel):
    """A piece of a text (``delta``), or all of it (``text``)."""

    type: Literal[
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
    ]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: Annotated[str | None, LeftOutWhenNone] = None
    text: Annotated[str | None, LeftOutWhenNone] = None
    logprobs: Annotated[list[Any] | None, LeftOutWhenNone] = None


class ArgumentsEvent(BaseModel):
    """A piece of the arguments of a call (``delta``), or all of them (``arguments``)."""

    type: Literal["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: Annotated[str | None, LeftOutWhenNone] = None
    delta: Annotated[str | None, LeftOutWhenNone] = None
    arguments: Annotated[str | None, LeftOutWhenNone] = None


class StreamedEvent(RootModel[ResponseEvent | ItemEvent | PartEvent | TextEvent | ArgumentsEvent]):
    """One event of a streamed response."""
