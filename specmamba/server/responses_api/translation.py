"""From the body of POST /v1/responses to that of a chat: the same conversation, in its terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from specmamba.server.api.conversation import ChatCompletionRequest
from specmamba.server.http.error_answers import api_error_of_validation
from specmamba.server.http.handoff_fields import HANDOFF_FIELDS
from specmamba.server.responses_api.response_fields import (
    ChosenFunction,
    FlatSchemaFormat,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
    TextOptions,
    TextPiece,
)

_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream")
_SAME_EXTENSIONS = ("seed", "top_k", "chat_template_kwargs", "cache_salt")


# Names of fields for errors of the chat. Several items may be one message, so that an index would mislead.
NAMES = {
    r"messages\[\d+\](\.tool_calls\[\d+\]\.function)?": "input[]",
    "messages": "input",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
    r"response_format(\.json_schema)?": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens|max_tokens": "max_output_tokens",
}


def as_chat(body: ResponseRequest) -> ChatCompletionRequest:
    """The request as a chat.

    Raises:
        ApiError: 400; the fields do not go together.
    """
    chat: dict[str, Any] = {name: getattr(body, name) for name in (*_SAME, *_SAME_EXTENSIONS, *HANDOFF_FIELDS)}
    chat["messages"] = messages_of(body.input, body.instructions)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["tools"] = None if body.tools is None else [_tool(tool) for tool in body.tools]
    chat["tool_choice"] = _choice(body.tool_choice)
    chat["response_format"] = _format(body.text)
    chat["reasoning_effort"] = None if body.reasoning is None else body.reasoning.effort
    if body.speculative is not None:
        chosen = body.speculative
        chat["speculative"] = chosen if isinstance(chosen, bool) else chosen.model_dump(exclude_unset=True)
    if body.stream:
        chat["stream_options"] = {"include_usage": True}
    try:
        return ChatCompletionRequest.model_validate(chat)
    except ValidationError as error:
        raise api_error_of_validation(error.errors()) from None


def messages_of(given: str | Sequence[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat. Items of one answer of the assistant become one message."""
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case ReasoningItem():
                if text := _reasoning(item):
                    _turn(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text
            case MessageItem(role="assistant"):
                _turn(messages, "content", "tool_calls")["content"] = _text(item.content)
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _turn(messages).setdefault("tool_calls", []).append(call)
            case FunctionOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case MessageItem():
                _add_message(messages, item)
    return messages


def _add_message(messages: list[dict[str, Any]], item: MessageItem) -> None:
    """Add a message; a system message behind the instructions joins them: most templates allow only one."""
    text = _text(item.content)
    if item.role in ("system", "developer") and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{text}"
    else:
        messages.append({"role": item.role, "content": text})


def _turn(messages: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """The last message if it is the assistant's and has none of the fields ``taken``, else a new one."""
    if messages and messages[-1]["role"] == "assistant" and not any(name in messages[-1] for name in taken):
        return messages[-1]
    messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: str | Sequence[TextPiece]) -> str:
    return content if isinstance(content, str) else "\n".join(piece.text for piece in content)


def _reasoning(item: ReasoningItem) -> str:
    return _text(item.content or item.summary or "")


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _choice(choice: str | ChosenFunction | None) -> Any:
    if isinstance(choice, ChosenFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    if isinstance(text.format, FlatSchemaFormat):
        return {"type": "json_schema", "json_schema": text.format.model_dump(by_alias=True, exclude={"type"})}
    return text.format.model_dump()
