"""Conversations: the body of POST /v1/chat/completions, and the text that the chat template makes of its messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import Request
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from specmamba.errors import RequestError
from specmamba.sampling_params import NumLogprobs
from specmamba.server.api.requests import GenerationRequest, NoEffect, NotYet
from specmamba.server.api.service import Service
from specmamba.server.http.error_answers import ApiError, as_api_error
from specmamba.server.http.fields import MessageContent, StrictModel, only, shortened
from specmamba.server.tools.definitions import EarlierCall, JsonObject, NamedTool, ToolChoice, Tools
from specmamba.templates.rendering import Effort, ReasoningEffort, RenderedChat

MAX_MESSAGES, MAX_CALLS = 4096, 128
# Characters of the arguments of all earlier calls together: each is read as JSON.
MAX_ARGUMENTS = 1 << 19
MAX_VARIABLES = 32

Empty = Field(description="only empty values: a client may send an answer back as it came")


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        MessageContent | None, Field(description="null or left out only beside tool_calls or reasoning_content")
    ] = None
    name: Annotated[str | None, Field(max_length=256, description="handed to the chat template")] = None
    tool_calls: Annotated[
        list[EarlierCall] | None, Field(max_length=MAX_CALLS, description="of an earlier answer of the assistant's")
    ] = None
    tool_call_id: Annotated[
        str | None, Field(min_length=1, max_length=256, description="the call that a tool's message answers")
    ] = None
    reasoning_content: Annotated[str | None, Field(description="extension: handed to the chat template")] = None
    reasoning: Annotated[str | None, Field(description="extension: another name of reasoning_content")] = None
    refusal: Annotated[None, only(), Empty] = None
    audio: Annotated[None, only(), Empty] = None
    annotations: Annotated[list[Any] | None, only([]), Empty] = None
    function_call: Annotated[None, only(), Empty] = None

    _calls: list[dict[str, Any]] = PrivateAttr(default_factory=list)  # as chat templates read them

    @model_validator(mode="before")
    @classmethod
    def _fields_fit_the_role(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for field, role in (
                ("tool_calls", "assistant"),
                ("reasoning_content", "assistant"),
                ("reasoning", "assistant"),
                ("tool_call_id", "tool"),
            ):
                if value.get(field) and value.get("role") != role:
                    message = 'only a message of role "{role}" has this field'
                    raise PydanticCustomError("wrong_role", message, {"field": field, "role": role})
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.content is None and not (self.tool_calls or self.reasoning_content or self.reasoning):
            raise PydanticCustomError("missing", "this field is required", {"field": "content"})
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("missing", "this field is required", {"field": "tool_call_id"})
        for index, call in enumerate(self.tool_calls or ()):
            try:
                self._calls.append(call.for_template())
            except ValueError:
                field = f"tool_calls[{index}].function.arguments"
                raise PydanticCustomError("no_object", "must be a JSON object, written out", {"field": field}) from None
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it; text parts are joined with line breaks."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        message: dict[str, Any] = {"role": self.role, "content": content}
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        message |= {field: value for field, value in more.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = self._calls
        return message


def _few_arguments(value: object) -> object:
    """Limit the arguments of tool calls before any of them is parsed."""
    if isinstance(value, list):
        length = sum(map(_length_of_arguments, value))
        if length > MAX_ARGUMENTS:
            words = {"most": MAX_ARGUMENTS}
            raise PydanticCustomError("too_long", "arguments of tool calls: at most {most} characters in all", words)
    return value


def _length_of_arguments(message: object) -> int:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else ()
    arguments = (function.get("arguments") for function in functions if isinstance(function, Mapping))
    return sum(len(text) for text in arguments if isinstance(text, str))


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_few_arguments),
]

TemplateVariables = Annotated[
    JsonObject,
    Field(max_length=MAX_VARIABLES, description="extension: variables of the chat template (enable_thinking, say)"),
]


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="the newer name of max_tokens")] = None

    logprobs: Annotated[bool | None, Field(description="list the tokens of the answer with log-probabilities")] = None
    top_logprobs: Annotated[
        NumLogprobs | None, Field(description="with logprobs: likeliest tokens to list beside each one")
    ] = None
    tools: Annotated[Tools | None, Field(description="functions of the client's that the model may call")] = None
    tool_choice: Annotated[
        ToolChoice | None,
        Field(
            description='"auto" (the default with tools): as the model likes, if its chat template knows of tools; '
            '"none"; "required", or a function by name: the answer is a call, whose arguments keep to their schema'
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: one call at most. A forced answer is always one call")
    ] = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        Field(description="given to the chat template; one that only turns reasoning on or off: on for all but none"),
    ] = None

    safety_identifier: Annotated[str | None, NoEffect] = None
    prompt_cache_key: Annotated[str | None, NoEffect] = None
    store: Annotated[Literal[False] | None, only(False), NotYet] = None
    service_tier: Annotated[Literal["auto", "default"] | None, only("auto", "default"), NotYet] = None
    verbosity: Annotated[Literal["medium"] | None, only("medium"), NotYet] = None
    functions: Annotated[list[Any] | None, only([]), NotYet] = None
    function_call: Annotated[Literal["none", "auto"] | None, only("none", "auto"), NotYet] = None
    modalities: Annotated[list[Literal["text"]] | None, only(["text"]), NotYet] = None
    audio: Annotated[None, only(), NotYet] = None
    web_search_options: Annotated[None, only(), NotYet] = None
    # SGLang's, as those that chats share with completions
    continue_final_message: Annotated[Literal[False] | None, only(False), NotYet] = None
    separate_reasoning: Annotated[Literal[True] | None, only(True), NotYet] = None
    stream_reasoning: Annotated[Literal[True] | None, only(True), NotYet] = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise PydanticCustomError(
                "two_limits",
                "max_tokens is {old} and max_completion_tokens is {new}: send one of them",
                {"old": old, "new": new, "field": "max_tokens"},
            )
        return self

    @model_validator(mode="after")
    def _logprobs_come_first(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            message = 'only allowed together with "logprobs": true'
            raise PydanticCustomError("top_logprobs", message, {"field": "top_logprobs"})
        return self

    @model_validator(mode="after")
    def _choice_is_among_the_tools(self) -> Self:
        offered = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in offered:
            message = "there is no tool {name} among the tools"
            words = {"field": "tool_choice", "name": self.tool_choice.function.name}
            raise PydanticCustomError("unknown_tool", message, words)
        if self.tool_choice == "required" and not offered:
            raise PydanticCustomError("no_tools", "there are no tools to call", {"field": "tool_choice"})
        if self.ignore_eos and self.effective_tool_choice not in ("none", "auto"):
            message = "a call ends where its arguments are whole: ignore_eos does not go together with tool_choice"
            raise PydanticCustomError("ignore_eos", message, {"field": "ignore_eos"})
        if self.effective_tool_choice != "none" and self.grammar_field is not None:
            message = 'the form of an answer and tool calls do not go together: send "tool_choice": "none"'
            raise PydanticCustomError("two_grammars", message, {"field": self.grammar_field})
        return self

    @property
    def effective_tool_choice(self) -> Literal["none", "auto", "required"] | NamedTool:
        if not self.tools:
            return "none"
        return "auto" if self.tool_choice is None else self.tool_choice

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def logprobs_field(self) -> str:
        return "top_logprobs" if self.top_logprobs else "logprobs"


def check_template(service: Service) -> None:
    """Check that the checkpoint can turn conversations into prompts.

    Raises:
        ApiError: 400; it has no chat template.
        RequestError: no tokenizer was read.
    """
    service.tokenizer.require_text("a conversation", "messages")
    if not service.tokenizer.has_chat_template:
        raise ApiError(
            400, "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
        )


async def chat_text(
    service: Service,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
    request: Request,
    check_length: Callable[[int], None] | None = None,
    effort: Effort | None = None,
) -> RenderedChat:
    """The prompt of a conversation: its text with special tokens, up to the beginning of the answer.

    Args:
        service: has the chat template.
        messages: the conversation.
        tools: passed to the template.
        variables: further variables of the template.
        request: its connection; rendering ends when the client disconnects.
        check_length: as in ``Templates.render``.
        effort: the ``reasoning_effort`` of the request.

    Raises:
        ApiError: 400; there is no chat template, it rejects the messages, tools or variables, or it exceeds a limit.
            503: the turn of this conversation did not come in time. 499: the client disconnected.
    """
    check_template(service)
    as_dicts = [message.for_template() for message in messages]
    try:
        return await service.templates.render(as_dicts, tools, variables, request, check_length, effort)
    except RequestError as error:
        raise about_messages(error) from None


def about_messages(error: ApiError | RequestError) -> ApiError:
    """An error of the engine with the field "messages" in place of "prompt", which a chat request does not have."""
    named = as_api_error(error)
    param = "messages" if named.detail.param == "prompt" else named.detail.param
    return ApiError(named.status, shortened(str(error)), param=param, code=named.detail.code)
