"""From the body of POST /v1/messages to that of a chat: the same conversation, in its terms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from specmamba.server.api.conversation import ChatCompletionRequest
from specmamba.server.api.service import Service
from specmamba.server.http.error_answers import ApiError, api_error_of_validation
from specmamba.server.http.handoff_fields import HANDOFF_FIELDS
from specmamba.server.messages_api.message_fields import (
    CountRequest,
    InputMessage,
    MessageRequest,
    MessageTool,
    MessageToolChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from specmamba.templates.rendering import Effort

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "cache_salt")


# Names of fields for errors of the chat. A message may have become several, so that an index would mislead.
_NAMES = {
    r"messages\[\d+\](\.tool_calls\[\d+\]\.function)?": "messages[]",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
    r"response_format(\.json_schema)?": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
}


def names_of(body: CountRequest) -> dict[str, str]:
    """The names of fields for errors of the chat, as ``fields_named`` takes them."""
    has_effort = body.output_config is not None and body.output_config.effort is not None
    is_off = body.thinking is not None and body.thinking.type == "disabled"
    return {**_NAMES, "reasoning_effort": "output_config.effort" if has_effort and not is_off else "thinking"}


def as_chat(body: CountRequest) -> ChatCompletionRequest:
    """The request as a chat.

    Raises:
        ApiError: 400; the fields do not go together.
    """
    chat: dict[str, Any] = {name: getattr(body, name, None) for name in _SAME}
    chat["messages"] = [*_system(body), *(message for given in body.messages for message in _messages(given))]
    chat["tools"] = None if body.tools is None else [_tool(tool) for tool in body.tools]
    chat |= _choice(body.tool_choice)
    if body.output_config is not None and (wanted := body.output_config.format) is not None:
        schema = {"name": "answer", "schema": wanted.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessageRequest):
        chat |= {name: getattr(body, name) for name in HANDOFF_FIELDS}
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
        chat["stream_options"] = {"include_usage": True} if body.stream else None
        if (chosen := body.speculative) is not None:
            chat["speculative"] = chosen if isinstance(chosen, bool) else chosen.model_dump(exclude_unset=True)
    try:
        return ChatCompletionRequest.model_validate(chat)
    except ValidationError as error:
        raise api_error_of_validation(error.errors()) from None


def effort_of(body: CountRequest, service: Service) -> Effort | None:
    """How much the model is to think; None: as its template does.

    Raises:
        ApiError: 400; a model that does not think is to think.
    """
    effort = None if body.output_config is None else body.output_config.effort
    if body.thinking is None:
        return effort
    does_think = service.reasoning.parser != "none"
    if body.thinking.type == "disabled":
        return "off" if does_think else None
    if body.thinking.type == "enabled" and not does_think:
        message = "thinking: this server knows no reasoning of this model (--reasoning-parser)"
        raise ApiError(400, message, param="thinking", code="not_supported")
    return effort or "on"


def _system(body: CountRequest) -> list[dict[str, Any]]:
    text = _text(body.system)
    return [{"role": "system", "content": text}] if text else []


def _text(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _messages(given: InputMessage) -> list[dict[str, Any]]:
    if isinstance(given.content, str):
        return [{"role": given.role, "content": given.content}]
    if given.role == "assistant":
        return [_assistant(given)]
    messages: list[dict[str, Any]] = []
    for block in given.content:
        match block:
            case ToolResultBlock():
                text = ("Error: " if block.is_error else "") + _text(block.content)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            case TextBlock() if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += f"\n{block.text}"
            case TextBlock():
                messages.append({"role": "user", "content": block.text})
    return messages


def _assistant(given: InputMessage) -> dict[str, Any]:
    """One message: its texts joined, its calls, its reasoning."""
    texts, calls, thoughts = [], [], []
    for block in given.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _tool(tool: MessageTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _choice(choice: MessageToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    parallel = False if choice.disable_parallel_tool_use else None
    return {"tool_choice": _CHOICES.get(choice.type, named), "parallel_tool_calls": parallel}
