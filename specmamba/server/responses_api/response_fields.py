"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from specmamba.sampling_params import Seed, Temperature, TopK, TopP
from specmamba.server.api.conversation import MAX_CALLS, MAX_MESSAGES, TemplateVariables
from specmamba.server.api.requests import CacheKey, NoEffect, NotYet
from specmamba.server.api.structured import JsonObjectFormat, NamedSchema, TextFormat
from specmamba.server.http.fields import MAX_PARTS, STRING, EncodableText, Metadata, Speculation, StrictModel, only
from specmamba.server.http.handoff_fields import HandoffRequest
from specmamba.server.tools.definitions import (
    Choice,
    FunctionDefinition,
    FunctionType,
    JsonObject,
    ToolName,
    choice_or_one,
)
from specmamba.templates.rendering import ReasoningEffort

Status = Annotated[Literal["in_progress", "completed", "incomplete"] | None, NoEffect]
ItemId = Annotated[str | None, Field(max_length=256, description="accepted; changes nothing")]


class TextPiece(StrictModel):
    """A part of a message, an output or a reasoning. Images, sound and files are refused: the model reads text."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: Annotated[list[Any] | None, only([]), Field(description="only empty: as an answer gives them")] = None
    logprobs: Annotated[list[Any] | None, only([]), Field(description="only empty: as an answer gives them")] = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:  # before an error reports the fields of an image as unknown
        if isinstance(value, dict) and not str(value.get("type", "text")).endswith("text"):
            raise PydanticCustomError("not_supported", "only parts of text are supported", {"field": "type"})
        return value


def _kind_of_content(value: object) -> str | None:
    return STRING if isinstance(value, str) else "(parts)" if isinstance(value, list) else None


TextPieces = Annotated[list[TextPiece], Field(max_length=MAX_PARTS, fail_fast=True)]

TextOrPieces = Annotated[
    Annotated[str, Tag(STRING)] | Annotated[TextPieces, Tag("(parts)")],
    Discriminator(
        _kind_of_content, custom_error_type="content_type", custom_error_message="must be a string or a list of parts"
    ),
]


class MessageItem(StrictModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOrPieces
    id: ItemId = None
    status: Status = None


class FunctionCallItem(StrictModel):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: ToolName
    arguments: Annotated[str, Field(max_length=1 << 20, description="a JSON object, written out")]
    id: ItemId = None
    status: Status = None


class FunctionOutputItem(StrictModel):
    """What the client's function has returned for a call."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    output: TextOrPieces
    id: ItemId = None
    status: Status = None


class ReasoningItem(StrictModel):
    """The reasoning of an earlier answer: its content, else its summary."""

    type: Literal["reasoning"]
    summary: TextPieces | None = None
    content: TextPieces | None = None
    encrypted_content: Annotated[None, only(), NotYet] = None
    id: ItemId = None
    status: Status = None


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _kind_of_item(value: object) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return f"({kind})" if kind in _ITEMS else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[FunctionCallItem, Tag("(function_call)")]
    | Annotated[FunctionOutputItem, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")],
    Discriminator(
        _kind_of_item,
        custom_error_type="not_supported",
        custom_error_message='must be a "message", "function_call", "function_call_output" or "reasoning"',
    ),
]

Input = Annotated[
    Annotated[str, Tag(STRING)]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("(parts)")],
    Discriminator(
        _kind_of_content, custom_error_type="input_type", custom_error_message="must be a string or a list of items"
    ),
]


class FunctionTool(FunctionDefinition):
    """A function that the model may ask the client to call."""

    type: FunctionType

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:  # before an error reports the fields of another tool as unknown
        if isinstance(value, dict) and value.get("type", "function") != "function":
            raise PydanticCustomError("not_supported", 'only tools of type "function" are supported', {"field": "type"})
        return value


class ChosenFunction(StrictModel):
    """The one function that must be called."""

    type: FunctionType
    name: ToolName


ResponseToolChoice = Annotated[
    Choice | Annotated[ChosenFunction, Tag("(object)")], choice_or_one(ChosenFunction, "functions")
]


class FlatSchemaFormat(NamedSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


def _kind_of_format(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"({kind})" if kind in ("text", "json_object", "json_schema") else None


class TextOptions(StrictModel):
    """The form of the answer's text."""

    format: Annotated[
        Annotated[
            Annotated[TextFormat, Tag("(text)")]
            | Annotated[JsonObjectFormat, Tag("(json_object)")]
            | Annotated[FlatSchemaFormat, Tag("(json_schema)")],
            Discriminator(
                _kind_of_format,
                custom_error_type="response_format_type",
                custom_error_message='must be an object whose "type" is "text", "json_object" or "json_schema"',
            ),
        ]
        | None,
        Field(description="as response_format of chats"),
    ] = None
    verbosity: Annotated[Literal["medium"] | None, only("medium"), NotYet] = None


class ReasoningOptions(StrictModel):
    """How much the model thinks. Its reasoning is given as it is, and not summarized."""

    effort: ReasoningEffort | None = None
    summary: Annotated[Literal["auto", "concise", "detailed"] | None, NoEffect] = None


class ResponseStreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_obfuscation: Annotated[Literal[False] | None, only(False), NotYet] = None


class ResponseRequest(HandoffRequest):
    """The body of POST /v1/responses. Nothing is stored, so that a conversation is sent whole every time."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models; none: the served model")] = None
    input: Input
    instructions: Annotated[EncodableText | None, Field(description="a system message in front of the input")] = None
    max_output_tokens: Annotated[int | None, Field(ge=1, description="new tokens at the most, reasoning included")] = (
        None
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Annotated[list[FunctionTool] | None, Field(max_length=MAX_CALLS)] = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: one call at most")] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    # extensions, as in chats
    seed: Seed | None = None
    top_k: TopK | None = None
    chat_template_kwargs: TemplateVariables | None = None
    cache_salt: CacheKey | None = None
    speculative: Speculation | None = None

    metadata: Annotated[Metadata | None, Field(description="given back; changes nothing")] = None
    user: Annotated[str | None, NoEffect] = None
    safety_identifier: Annotated[str | None, NoEffect] = None
    prompt_cache_key: Annotated[str | None, NoEffect] = None
    store: Annotated[Literal[False] | None, only(False), Field(description="nothing is stored")] = None
    previous_response_id: Annotated[None, only(), Field(description="nothing is stored: send the conversation")] = None
    conversation: Annotated[None, only(), Field(description="nothing is stored: send the conversation")] = None
    background: Annotated[Literal[False] | None, only(False), NotYet] = None
    include: Annotated[list[Any] | None, only([]), NotYet] = None
    max_tool_calls: Annotated[None, only(), NotYet] = None
    prompt: Annotated[None, only(), NotYet] = None
    service_tier: Annotated[Literal["auto", "default"] | None, only("auto", "default"), NotYet] = None
    top_logprobs: Annotated[Literal[0] | None, only(0), NotYet] = None
    truncation: Annotated[Literal["disabled"] | None, only("disabled"), NotYet] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            message = 'only allowed together with "stream": true'
            raise PydanticCustomError("stream_options", message, {"field": "stream_options"})
        return self
