"""What clients may send to POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specmamba.server.fields import MessageContent, StrictModel, only
from specmamba.server.protocol import GenerationRequest, NoEffect, NotYet


class ChatMessage(StrictModel):
    """One message of a conversation. The fields after ``name`` let clients send an earlier answer back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent
    name: Annotated[str | None, Field(description="handed to the chat template")] = None
    refusal: Annotated[None, only(), NotYet] = None
    audio: Annotated[None, only(), NotYet] = None
    annotations: Annotated[list[Any] | None, only([]), NotYet] = None
    tool_calls: Annotated[list[Any] | None, only([]), NotYet] = None
    function_call: Annotated[None, only(), NotYet] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it; parts of a content are joined by line breaks."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="the newer name of max_tokens")] = None

    safety_identifier: Annotated[str | None, NoEffect] = None
    prompt_cache_key: Annotated[str | None, NoEffect] = None
    store: Annotated[Literal[False] | None, only(False), NotYet] = None
    service_tier: Annotated[Literal["auto", "default"] | None, only("auto", "default"), NotYet] = None
    verbosity: Annotated[Literal["medium"] | None, only("medium"), NotYet] = None
    reasoning_effort: Annotated[None, only(), NotYet] = None
    logprobs: Annotated[Literal[False] | None, only(False), NotYet] = None
    top_logprobs: Annotated[Literal[0] | None, only(0), NotYet] = None
    response_format: Annotated[dict[str, Any] | None, only({"type": "text"}), NotYet] = None
    tools: Annotated[list[Any] | None, only([]), NotYet] = None
    tool_choice: Annotated[Literal["none", "auto"] | None, only("none", "auto"), NotYet] = None
    parallel_tool_calls: Annotated[bool | None, only(True, False), NotYet] = None
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
