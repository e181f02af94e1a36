"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from specmamba.sampling_params import MAX_STOP_STRINGS, StopString, Temperature, TopK, TopP
from specmamba.server.api.conversation import MAX_CALLS, MAX_MESSAGES, TemplateVariables
from specmamba.server.api.requests import CacheKey, NoEffect, NotYet
from specmamba.server.http.fields import MAX_PARTS, STRING, Speculation, StrictModel, only
from specmamba.server.http.handoff_fields import HandoffRequest
from specmamba.server.tools.definitions import JsonObject, ToolName

CacheControl = Annotated[
    dict[str, Any] | None, Field(description="changes nothing: prefixes are cached without being asked for")
]


class TextBlock(StrictModel):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any] | None, only([]), NotYet] = None


class ThinkingBlock(StrictModel):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, NoEffect] = None


class ToolUseBlock(StrictModel):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: ToolName
    input: JsonObject
    cache_control: CacheControl = None


def _kind_of_text(value: object) -> str | None:
    return STRING if isinstance(value, str) else "(blocks)" if isinstance(value, list) else None


def _kind_of_block(*kinds: str) -> Any:
    def kind_of(value: object) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"({kind})" if kind in kinds else None

    names = " or ".join(f'"{kind}"' for kind in kinds)
    message = f"only blocks of type {names} are supported here"
    return Discriminator(kind_of, custom_error_type="not_supported", custom_error_message=message)


_or_blocks = Discriminator(
    _kind_of_text, custom_error_type="content_type", custom_error_message="must be a string or a list of blocks"
)
TextBlocks = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("(text)")], _kind_of_block("text")]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
BlockText = Annotated[Annotated[str, Tag(STRING)] | Annotated[TextBlocks, Tag("(blocks)")], _or_blocks]


class ToolResultBlock(StrictModel):
    """What the client's tool has returned for a call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: BlockText | None = None
    is_error: Annotated[bool | None, Field(description='true: "Error: " is written in front of the content')] = None
    cache_control: CacheControl = None


Block = Annotated[
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")],
    _kind_of_block("text", "thinking", "tool_use", "tool_result"),
]
BlockList = Annotated[list[Block], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


class InputMessage(StrictModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[Annotated[str, Tag(STRING)] | Annotated[BlockList, Tag("(blocks)")], _or_blocks]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Self:
        wrong = ("tool_result",) if self.role == "assistant" else ("thinking", "tool_use")
        blocks = [] if isinstance(self.content, str) else self.content
        for index, block in enumerate(blocks):
            if block.type in wrong:
                words = {"field": f"content[{index}].type", "role": self.role, "kind": block.type}
                raise PydanticCustomError("wrong_role", 'a message of role "{role}" has no block "{kind}"', words)
        return self


class MessageTool(StrictModel):
    """A tool of the client. Tools that a server runs are refused."""

    type: Annotated[Literal["custom"] | None, only("custom")] = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: Annotated[bool | None, Field(description="true only where tool_choice forces a call")] = None
    cache_control: CacheControl = None

    @model_validator(mode="before")
    @classmethod
    def _is_custom(cls, value: Any) -> Any:  # before an error reports the fields of another tool as unknown
        if isinstance(value, dict) and value.get("type") not in (None, "custom"):
            raise PydanticCustomError("not_supported", 'only tools of type "custom" are supported', {"field": "type"})
        return value


class MessageToolChoice(StrictModel):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: Annotated[bool | None, Field(description="true: one call at most")] = None

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            message = "the name of a tool goes together with type {type}"
            raise PydanticCustomError("tool_name", message, {"field": "name", "type": '"tool"'})
        return self


class Thinking(StrictModel):
    """Whether the model thinks before it answers. Reasoning is bounded by max_tokens alone."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1, description="accepted; changes nothing")] = None
    display: Annotated[Literal["summarized"] | None, only("summarized"), NoEffect] = None


class MessageFormat(StrictModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """How much the model thinks, and the form of its answer."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh"] | None, Field(description="as reasoning_effort of chats")
    ] = None
    format: MessageFormat | None = None


class CountRequest(StrictModel):
    """The body of POST /v1/messages/count_tokens: what makes the prompt."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models; none: the served model")] = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: BlockText | None = None
    tools: Annotated[list[MessageTool] | None, Field(max_length=MAX_CALLS)] = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    chat_template_kwargs: TemplateVariables | None = None
    context_management: Annotated[None, only(), NotYet] = None
    mcp_servers: Annotated[list[Any] | None, only([]), NotYet] = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> Self:
        if self.messages[-1].role == "assistant":
            message = "the last message must be the user's: an answer that is begun cannot be continued"
            raise PydanticCustomError("not_supported", message, {"field": "messages"})
        return self


class MessageRequest(CountRequest, HandoffRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, description="new tokens at the most, with reasoning")]
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[list[StopString] | None, Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] = None
    stream: bool | None = None

    # extensions, as in chats
    cache_salt: CacheKey | None = None
    speculative: Speculation | None = None

    metadata: Annotated[dict[str, Any] | None, NoEffect] = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, only("auto", "standard_only"), NoEffect] = None
    container: Annotated[None, only(), NotYet] = None
    inference_geo: Annotated[None, only(), NotYet] = None
    speed: Annotated[Literal["standard"] | None, only("standard"), NotYet] = None
