"""Rendering of conversations by the chat template of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specmamba.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

# Arguments of the renderer itself. With ``chat_template`` a client could run a program of its own.
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
    """Render a conversation up to the beginning of the assistant's answer, in a sandbox without side effects.

    Raises:
        RequestError: the template refuses these messages, or does not read one of the variables.
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
    # A template is a program over the client's input: any error in it is an error of that request.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise RequestError(f"the model's chat template refuses these messages: {reason}", "messages") from error
    text: str = rendered[0][0]
    return text


def check_variables(template: str, special_tokens: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
    """Raise RequestError for a variable that the template does not read, or that clients may not set."""
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
    """The variables that a template reads and does not define; empty where it is not a valid template."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks answers in templates and adds nothing to the text."""

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
    """Rename the role "developer" to "system" for templates without it, which would leave the message out."""
    is_new = message.get("role") == "developer" and "developer" not in template
    return {**message, "role": "system"} if is_new else dict(message)
