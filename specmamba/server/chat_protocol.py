"""What clients may send to POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specmamba.core import NumLogprobs
from specmamba.server.chat_messages import Messages
from specmamba.server.fields import only
from specmamba.server.protocol import GenerationRequest, NoEffect, NotYet
from specmamba.server.tools.definitions import JsonObject, NamedTool, ToolChoice, Tools

MAX_VARIABLES = 32
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

    safety_identifier: Annotated[str | None, NoEffect] = None
    prompt_cache_key: Annotated[str | None, NoEffect] = None
    store: Annotated[Literal[False] | None, only(False), NotYet] = None
    service_tier: Annotated[Literal["auto", "default"] | None, only("auto", "default"), NotYet] = None
    verbosity: Annotated[Literal["medium"] | None, only("medium"), NotYet] = None
    reasoning_effort: Annotated[None, only(), NotYet] = None
    functions: Annotated[list[Any] | None, only([]), NotYet] = None
    function_call: Annotated[Literal["none", "auto"] | None, only("none", "auto"), NotYet] = None
    modalities: Annotated[list[Literal["text"]] | None, only(["text"]), NotYet] = None
    audio: Annotated[None, only(), NotYet] = None
    prediction: Annotated[None, only(), NotYet] = None
    web_search_options: Annotated[None, only(), NotYet] = None

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
