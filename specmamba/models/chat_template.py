"""Conversations written out by the chat template of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specmamba.errors import RequestError

# What the renderer takes itself. A client that set ``chat_template`` would bring a program of its own.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)


def render(
    template: str,
    special_tokens: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation, up to where the assistant's answer begins; in a sandbox that changes nothing.

    Raises:
        RequestError: the template refuses these messages, or never reads one of the variables.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    check_variables(template, special_tokens, variables)
    try:
        rendered = render_jinja_template(
            conversations=[[_known_role(message, template) for message in messages]],
            tools=None if tools is None else [dict(tool) for tool in tools],
            chat_template=template,
            add_generation_prompt=True,
            **special_tokens,
            **variables,
        )
    # A template is a program over what the client sent: any error of it is the answer to that client.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise RequestError(f"the model's chat template refuses these messages: {reason}", "messages") from error
    text: str = rendered[0][0]
    return text


def check_variables(template: str, special_tokens: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
    """Raises RequestError for a variable that the template cannot read, or that is not the client's to set."""
    for name in variables:
        if name in RESERVED or name in special_tokens:
            problem = "is not for clients to set"
        elif re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) and re.search(rf"\b{name}\b", template):
            continue
        else:
            problem = "is nothing that the model's chat template reads"
        raise RequestError(f"{name[:100]!r} {problem}", "chat_template_kwargs")


def _known_role(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The role "developer" is a newer word for "system"; templates that do not know it would leave the message out."""
    is_new = message.get("role") == "developer" and "developer" not in template
    return {**message, "role": "system"} if is_new else dict(message)
