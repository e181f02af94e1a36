"""Conversations written out by the chat template of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specmamba.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

# What the renderer takes itself. A client that set ``chat_template`` would bring a program of its own.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "raise_exception",
        "return_assistant_tokens_mask",
        "strftime_now",
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
        elif name in variables_of(template):
            continue
        else:
            problem = "is nothing that the model's chat template reads"
        raise RequestError(f"{name[:100]!r} {problem}", "chat_template_kwargs")


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """What a template reads and does not define itself; nothing where it is no template."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks answers: templates may have it, and it adds nothing to a text."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(names - environment.globals.keys())


def _known_role(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The role "developer" is a newer word for "system"; templates that do not know it would leave the message out."""
    is_new = message.get("role") == "developer" and "developer" not in template
    return {**message, "role": "system"} if is_new else dict(message)
