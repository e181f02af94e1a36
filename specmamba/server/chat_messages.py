"""The messages of a conversation, as clients send them and as chat templates read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from specmamba.server.fields import MessageContent, StrictModel, only
from specmamba.server.tools.definitions import EarlierCall

MAX_MESSAGES, MAX_CALLS = 4096, 128
# Characters of the arguments of all earlier calls together: each is read as JSON.
MAX_ARGUMENTS = 1 << 19
Empty = Field(description="only the values that say nothing: a client may send an answer back as it came")


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        MessageContent | None, Field(description="may be null or left out only where there are tool_calls")
    ] = None
    name: Annotated[str | None, Field(max_length=256, description="handed to the chat template")] = None
    tool_calls: Annotated[
        list[EarlierCall] | None, Field(max_length=MAX_CALLS, description="of an earlier answer of the assistant's")
    ] = None
    tool_call_id: Annotated[
        str | None, Field(min_length=1, max_length=256, description="the call that a tool's message answers")
    ] = None
    reasoning_content: Annotated[str | None, Field(description="extension: handed to the chat template")] = None
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
                ("tool_call_id", "tool"),
            ):
                if value.get(field) and value.get("role") != role:
                    message = 'only a message of role "{role}" has this field'
                    raise PydanticCustomError("wrong_role", message, {"field": field, "role": role})
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.content is None and not self.tool_calls:
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
        """The message as chat templates read it; parts of a content are joined by line breaks."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        message: dict[str, Any] = {"role": self.role, "content": content}
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        message |= {field: value for field, value in more.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = self._calls
        return message


def _few_arguments(value: object) -> object:
    """Counted before anything is read."""
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
